"""ChatGLM-6B checkpoints into the model's parameters, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
from safetensors.numpy import save_file

from glm_multiuser.checkpoint.huggingface import WEIGHTS, StoredTensor, open_folder
from glm_multiuser.checkpoint.name_maps import (
    NO_WEIGHT,
    Array,
    Placement,
    glm_placements,
    their_shape,
    to_our_layout,
    to_their_layout,
)
from glm_multiuser.config import ModelConfig
from glm_multiuser.errors import CheckpointError

Parameters = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Name of a parameter -> its shape and dtype."""


def load_glm(
    folder: Path,
    config: ModelConfig,
    parameters: Parameters,
    assign: Callable[[str, Array], None],
    progress: Optional[Callable[[int, int, str], None]] = None,
) -> None:
    """Fills every parameter of a ChatGLM-6B model from a folder, one tensor at a time.

    Names and shapes are all checked before the first parameter is assigned, so a checkpoint that
    does not fit is refused at once. Beyond the weights, memory holds one tensor (two if it is
    stored as bfloat16).

    Args:
        folder: in Hugging Face layout.
        config: of the model.
        parameters: the model's parameters: weights in [in, out], without caches.
        assign: takes a parameter's name and its values, of exactly that shape and dtype.
        progress: told (number of parameters done, all of them, name of the next one).

    Raises:
        CheckpointError: a tensor that is missing, superfluous, of another shape, or too large
            for its parameter's dtype; a file that `open_folder` refuses.
    """
    tensors = _matched(folder, open_folder(folder), glm_placements(config.num_layers), parameters)
    for done, (place, tensor) in enumerate(tensors):
        if progress is not None:
            progress(done, len(tensors), place.name)
        dtype = parameters[place.name][1]
        try:
            with np.errstate(over="raise"):
                values = to_our_layout(tensor.read(), place, config.num_attention_heads, dtype)
        except FloatingPointError:
            raise CheckpointError(
                f"{tensor.name} in {tensor.path} has values beyond the range of {dtype}"
            ) from None
        assign(place.name, values)


def _matched(
    folder: Path,
    tensors: dict[str, StoredTensor],
    places: dict[str, Placement],
    parameters: Parameters,
) -> list[tuple[Placement, StoredTensor]]:
    """Every parameter's tensor, in the order of the checkpoint.

    Raises:
        CheckpointError: they do not fit one to one.
    """
    missing = set(parameters)
    matched = []
    for name, tensor in tensors.items():
        if NO_WEIGHT.search(name):
            continue
        place = places.get(name)
        if place is None or place.name not in parameters:
            raise CheckpointError(
                f"{name} {list(tensor.shape)} in {tensor.path} has no place in this model"
            )
        expected = their_shape(place, parameters[place.name][0])
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} in {tensor.path} has shape {list(tensor.shape)}; "
                f"this model needs {list(expected)}"
            )
        missing.discard(place.name)
        matched.append((place, tensor))
    if missing:
        name_of = {place.name: name for name, place in places.items()}
        first = min(missing)
        shape = parameters[first][0]
        if first in name_of:
            shape = their_shape(places[name_of[first]], shape)
        raise CheckpointError(
            f"{folder} lacks {name_of.get(first, first)}, expected with shape {list(shape)}; "
            f"missing tensors: {len(missing)}"
        )
    return matched


def write_huggingface(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and `model.safetensors`, each complete or not at all.

    Args:
        folder: is created if need be. Shards and an index that are there stay, and readers
            prefer the single file to them.
        config: the content of `config.json`.
        arrays: every weight of the model in our names and layouts.

    Raises:
        ConfigError: `config` is not one of ChatGLM-6B.
        CheckpointError: the arrays are not exactly the weights of such a model.
    """
    model = ModelConfig.from_dict(config)
    places = glm_placements(model.num_layers)
    wrong = {place.name for place in places.values()} ^ set(arrays)
    if wrong:
        raise CheckpointError(f"{min(wrong)} is missing, or is no weight of this model")
    tensors = {
        name: to_their_layout(arrays[place.name], place, model.num_attention_heads)
        for name, place in places.items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    with _replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch()
    usual_mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(usual_mode)  # safetensors writes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
