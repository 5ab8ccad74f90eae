"""ChatGLM-6B checkpoints into the model's parameters, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from glm_multiuser.checkpoint.ckpt_file import find_ckpt, open_ckpt, save_ckpt
from glm_multiuser.checkpoint.huggingface import WEIGHTS, has_safetensors, open_folder
from glm_multiuser.checkpoint.json_file import write_json
from glm_multiuser.checkpoint.name_maps import (
    NO_WEIGHT,
    NO_WEIGHT_OF_MINDFORMERS,
    Placement,
    glm_placements,
    mindformers_placements,
    to_our_layout,
    to_their_layout,
)
from glm_multiuser.checkpoint.replacing import replacing
from glm_multiuser.checkpoint.stored_tensor import Array, StoredTensor
from glm_multiuser.config import ModelConfig
from glm_multiuser.errors import CheckpointError

Parameters = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Name of a parameter -> its shape and dtype."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> its shape, in our layout."""

Matched = list[tuple[Placement, StoredTensor]]

CKPT = "model.ckpt"
"""What a `.ckpt` file is called that is written here; any name is read."""


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
        folder: in Hugging Face layout, or with MindFormers' `.ckpt` instead of safetensors, in
            one file or in pieces. If it has both, the `.ckpt` is not looked at.
        config: of the model.
        parameters: the model's parameters: weights in [out, in], without caches.
        assign: takes a parameter's name and its values, of exactly that shape and dtype.
        progress: told (number of parameters done, all of them, name of the next one).

    Raises:
        CheckpointError: a tensor that is missing, superfluous, of another shape, or too large
            for its parameter's dtype; a file that `open_folder` or `open_ckpt` refuses.
    """
    folder = Path(folder)
    only_ckpt = bool(find_ckpt(folder)) and not has_safetensors(folder)
    match = match_ckpt if only_ckpt else match_huggingface
    tensors = match(folder, config, {name: shape for name, (shape, _) in parameters.items()})
    for done, (place, tensor) in enumerate(tensors):
        if progress is not None:
            progress(done, len(tensors), place.name)
        dtype = parameters[place.name][1]
        with in_range(tensor, dtype):
            values = to_our_layout(tensor.read(), place, config.num_attention_heads, dtype)
        assign(place.name, values)


def match_huggingface(folder: Path, config: ModelConfig, shapes: Shapes) -> Matched:
    """Finds the tensors of a folder in Hugging Face layout; raises as `load_glm` does."""
    tensors = open_folder(folder)
    weights = {name: one for name, one in tensors.items() if not NO_WEIGHT.search(name)}
    return _matched(folder, weights, glm_placements(config.num_layers), shapes)


def match_ckpt(source: Path, config: ModelConfig, shapes: Shapes) -> Matched:
    """Finds the tensors in MindFormers' file, or folder of files; raises as `load_glm` does."""
    weights = open_ckpt(find_ckpt(source), NO_WEIGHT_OF_MINDFORMERS)
    return _matched(source, weights, mindformers_placements(config.num_layers), shapes)


def _matched(
    source: Path,
    tensors: Mapping[str, StoredTensor],
    places: Mapping[str, Placement],
    shapes: Shapes,
) -> Matched:
    """Every parameter's tensor, in the order of the checkpoint.

    Raises:
        CheckpointError: they do not fit one to one.
    """
    missing = set(shapes)
    matched = []
    for name, tensor in tensors.items():
        place = places.get(name)
        if place is None or place.name not in shapes:
            raise CheckpointError(
                f"{name} {list(tensor.shape)} in {tensor.path} has no place in this model"
            )
        expected = shapes[place.name]
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
        raise CheckpointError(
            f"{source} lacks {name_of.get(first, first)}, "
            f"expected with shape {list(shapes[first])}; "
            f"missing tensors: {len(missing)}"
        )
    return matched


@contextmanager
def in_range(tensor: StoredTensor, dtype: DTypeLike) -> Iterator[None]:
    """Turns an overflow while `tensor` is cast to `dtype` into a `CheckpointError`."""
    try:
        with np.errstate(over="raise"):
            yield
    except FloatingPointError:
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} has values beyond the range of {np.dtype(dtype)}"
        ) from None


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
    tensors = dict(_in_their_layout(config, arrays, glm_placements))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / WEIGHTS, tensors)
    write_json(folder / "config.json", config)


def save_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes a `.safetensors` file as transformers reads it, complete or not at all."""
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})


def write_mindformers(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and MindFormers' `model.ckpt`, each complete or not at all.

    Arguments and errors are those of `write_huggingface`, but a reader that finds safetensors in
    the folder prefers those.
    """
    tensors = _in_their_layout(config, arrays, mindformers_placements)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_ckpt(folder / CKPT, tensors)
    write_json(folder / "config.json", config)


def _in_their_layout(
    config: Mapping[str, Any],
    arrays: Mapping[str, Array],
    placements: Callable[[int], Mapping[str, Placement]],
) -> Iterator[tuple[str, Array]]:
    """Checks at once; lays out one array after the other."""
    model = ModelConfig.from_dict(config)
    places = placements(model.num_layers)
    wrong = {place.name for place in places.values()} ^ set(arrays)
    if wrong:
        raise CheckpointError(f"{min(wrong)} is missing, or is no weight of this model")
    return (
        (name, to_their_layout(arrays[place.name], place, model.num_attention_heads))
        for name, place in places.items()
    )
