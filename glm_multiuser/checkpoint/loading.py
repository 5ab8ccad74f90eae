"""Loads checkpoints of any family into a model's parameters, and saves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, Optional

from glm_multiuser.checkpoint.ckpt_file import save_ckpt
from glm_multiuser.checkpoint.families import (
    layout_of_config,
    mindformers_placements,
    parameter_shapes,
)
from glm_multiuser.checkpoint.files import read_json_object, write_json
from glm_multiuser.checkpoint.huggingface import WEIGHTS
from glm_multiuser.checkpoint.matching import common_dtype, kept_types, match
from glm_multiuser.checkpoint.placement import Places, sizes_of, tensors_of
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from glm_multiuser.checkpoint.stored_tensor import Array, Sizes
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.progress import Progress

CKPT = "model.ckpt"
"""Name of the written `.ckpt` file; any name is read."""


def load_checkpoint(
    folder: Path,
    config: AnyModelConfig,
    parameters: Sizes,
    assign: Callable[[str, Array], None],
    progress: Optional[Progress] = None,
) -> None:
    """Fills every parameter of a model from a folder, one at a time.

    All names and shapes are checked before the first parameter is assigned, so an unsuitable
    checkpoint is rejected immediately. Besides the weights, memory holds one parameter and a
    block of `BLOCK_BYTES` for conversion.

    Args:
        folder: in Hugging Face layout, with safetensors or pytorch_model*.bin, or with MindFormers'
            `.ckpt`, in one or several files, or a GGUF file; of several formats, the first in this
            order is read.
        config: of the model.
        parameters: the model's parameters, without caches: name -> shape, with weights as
            [out, in], and dtype.
        assign: called with a parameter's name and its values, of exactly that shape and dtype.
        progress: called with (parameters done, total, name of the next one).

    Raises:
        CheckpointError: a tensor that is missing, unexpected, of another shape, not finite, or too
            large for its parameter's dtype; a file that `open_folder`, `open_ckpt` or `open_gguf`
            rejects.
    """
    shapes = {name: shape for name, (shape, _) in parameters.items()}
    matched = match(Path(folder), config, shapes)
    for done, parameter in enumerate(matched):
        if progress is not None:
            progress(done, len(matched), parameter.name)
        dtype = parameters[parameter.name][1]
        assign(parameter.name, parameter.read(dtype))


def check_tensors(folder: Path, config: AnyModelConfig) -> str:
    """Checks names and shapes like `load_checkpoint`, without reading weights.

    Returns:
        The smallest lossless type of all matrices: "float16", "bfloat16" or "float32".

    Raises:
        CheckpointError: as `load_checkpoint`, except for values.
    """
    return common_dtype(match(Path(folder), config, parameter_shapes(config)))


def stored_as(folder: Path, config: AnyModelConfig) -> tuple[str, dict[str, str]]:
    """Returns the result of `check_tensors`, and the stored type of each matrix by name, such as
    "q4_1" or "float16"; for plans. If weights are missing or cannot be loaded, returns the type in
    `config.json`, and no matrix.

    Raises:
        CheckpointError: a missing or unreadable `config.json`.
    """
    try:
        matched = match(Path(folder), config, parameter_shapes(config))
        return common_dtype(matched), kept_types(matched)
    except CheckpointError:  # loading will raise it again
        if not (Path(folder) / "config.json").is_file():
            raise
        values = read_json_object(Path(folder) / "config.json")
        dtype = values.get("dtype") or values.get("torch_dtype")
        return (dtype if dtype in ("float16", "bfloat16") else "float32"), {}


def write_huggingface(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and `model.safetensors`, each complete or not at all.

    Args:
        folder: is created if necessary. Existing shards and index are kept; readers prefer the
            single file.
        config: the content of `config.json`; it determines the layout. Its `quantization_config`
            is dropped.
        arrays: every weight of the model, with our names and layouts.

    Raises:
        ConfigError: `config` is not one of a supported model.
        CheckpointError: the arrays are not exactly the weights of such a model.
    """
    layout = layout_of_config(config)
    model = layout.read_config(config)
    places = layout.placements(model)
    folder = Path(folder)
    tensors = _prepared(folder, arrays, places, model)
    sizes = sizes_of({name: (one.shape, one.dtype) for name, one in arrays.items()}, places)
    save_safetensors(folder / WEIGHTS, sizes, tensors)
    write_json(folder / "config.json", _without_quantisation(config))


def write_mindformers(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes `config.json` and MindFormers' `model.ckpt`, each complete or not at all.

    Arguments and errors are those of `write_huggingface`, but readers prefer safetensors in the
    same folder.
    """
    model = layout_of_config(config).read_config(config)
    places = mindformers_placements(model)
    folder = Path(folder)
    save_ckpt(folder / CKPT, _prepared(folder, arrays, places, model))
    write_json(folder / "config.json", _without_quantisation(config))


def _without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _prepared(
    folder: Path, arrays: Mapping[str, Array], places: Places, model: AnyModelConfig
) -> Iterator[tuple[str, Array]]:
    """Creates the folder, and checks the arrays to write."""
    wrong = {place.name for place in places.values() if place} ^ set(arrays)
    if wrong:
        raise CheckpointError(f"{min(wrong)} is missing, or is no weight of this model")
    folder.mkdir(parents=True, exist_ok=True)
    return tensors_of(arrays.items(), places, model.num_attention_heads)
