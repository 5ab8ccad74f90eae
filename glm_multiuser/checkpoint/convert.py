"""Converts checkpoints between Hugging Face layout and MindFormers.

Everything passes through our own parameters, so a layout only maps to and from those.
pytorch_model*.bin and GGUF files can be converted to safetensors, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np

from glm_multiuser.checkpoint.ckpt_file import find_ckpt, save_ckpt
from glm_multiuser.checkpoint.families import (
    layout_of_config,
    mindformers_placements,
    model_config_of,
    parameter_shapes,
)
from glm_multiuser.checkpoint.files import filling, read_json_object, write_json
from glm_multiuser.checkpoint.gguf.config import gguf_config_json, has_sections
from glm_multiuser.checkpoint.gguf.file import open_gguf
from glm_multiuser.checkpoint.gguf.find import find_gguf
from glm_multiuser.checkpoint.huggingface import TORCH_WEIGHTS, WEIGHTS, format_of, has_weights
from glm_multiuser.checkpoint.loading import CKPT
from glm_multiuser.checkpoint.matching import MatchedParameter, match
from glm_multiuser.checkpoint.mindformers_arguments import mindformers_arguments
from glm_multiuser.checkpoint.placement import sizes_of, tensors_of
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from glm_multiuser.checkpoint.stored_tensor import Array, Sizes
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.progress import Progress
from glm_multiuser.tokenizers import FILES_READ
from glm_multiuser.tokenizers.gguf_files import write_gguf_tokenizer

HUGGINGFACE, MINDFORMERS = "huggingface", "mindformers"

MINDFORMERS_CONFIG = "mindformers_config.json"
"""The arguments of MindFormers' configuration class, except the path of the weights."""

WEIGHT_FILES = (".ckpt", ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Suffixes of weight files."""


def direction(source: Path, to: Optional[str]) -> str:
    """Returns the target format: `to`, or by default the one that `source` is not in.

    Raises:
        ConfigError: `to` is unknown, or missing although `source` has weights of both formats.
        CheckpointError: `source` has no weights to convert.
    """
    if to not in (None, HUGGINGFACE, MINDFORMERS):
        raise ConfigError(f"to is {to!r}; it must be {HUGGINGFACE!r} or {MINDFORMERS!r}")
    if find_gguf(source) is not None:
        if to == MINDFORMERS:
            raise CheckpointError(f"{source} is a GGUF model; it can only become {HUGGINGFACE}")
        return HUGGINGFACE
    if source.is_file() and source.suffix.lower() in (".safetensors", ".bin", ".json"):
        raise CheckpointError(
            f"{source} is a file; name its folder {source.parent}. Only .ckpt and GGUF files can "
            "be named themselves"
        )
    targets = []
    if find_ckpt(source):
        targets.append(HUGGINGFACE)
    if has_weights(source):
        targets.append(MINDFORMERS)
    if not targets:
        raise CheckpointError(
            f"no weights at {source}: neither {WEIGHTS}, {TORCH_WEIGHTS} nor a .ckpt file"
        )
    if to is None:
        if len(targets) > 1:
            theirs = format_of(source) or TORCH_WEIGHTS
            raise ConfigError(
                f"{source} has both {theirs} and .ckpt files; say which way with --to"
            )
        return targets[0]
    only_torch = has_weights(source) and format_of(source) != WEIGHTS
    if to not in targets and not (to == HUGGINGFACE and only_torch):
        raise CheckpointError(f"{source} has nothing to convert: its weights are {to} already")
    return to


def convert(
    source: Path,
    destination: Path,
    to: str,
    dtype: Optional[str],
    config_file: Optional[Path],
    force: bool,
    progress: Progress,
) -> None:
    """Writes a folder that this library and MindFormers or Hugging Face's code can load.

    It has the weights, `config.json`, the source's tokenizer files, and for MindFormers the
    arguments of its configuration class. Without `dtype`, weights keep their bits, except that
    bfloat16 becomes float32. Memory holds one parameter at a time.

    Args:
        source: a folder, or a `.ckpt` or GGUF file.
        destination: a folder; complete at the end, or untouched.
        to: as returned by `direction`.
        dtype: of the new weights, "float16" or "float32"; None keeps each weight's.
        config_file: default: the `config.json` next to the weights, or a GGUF file's metadata.
        force: whether to replace files in `destination`.
        progress: called with (tensors done, total, name of the next one).

    Raises:
        ConfigError: an argument out of its range, or a model that MindFormers cannot compute.
        CheckpointError: a source that `load_checkpoint` rejects, or a destination that cannot or
            must not be written.
    """
    if dtype not in (None, "float16", "float32"):
        raise ConfigError(f"dtype is {dtype!r}; it must be 'float16' or 'float32'")
    folder, gguf = source.parent if source.is_file() else source, find_gguf(source)
    if gguf is not None and has_sections(open_gguf(gguf)):
        raise CheckpointError(
            f"{gguf} has rope.dimension_sections; its rows are in another order than a folder's"
        )
    if gguf is not None and config_file is None:
        config_file, config = gguf, gguf_config_json(gguf)
    else:
        config_file = config_file or folder / "config.json"
        config = _read_config(config_file)
    model = model_config_of(config, config_file)
    config.pop("quantization_config", None)  # the output is floating-point
    to_mindformers = to == MINDFORMERS
    # Readers choose the layout of the new safetensors by the new config.json.
    placements = mindformers_placements if to_mindformers else layout_of_config(config).placements
    places = placements(model)
    from_ckpt = not to_mindformers and gguf is None and bool(find_ckpt(source))
    parameters = match(source, model, parameter_shapes(model), from_ckpt)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    _check_destination(destination, CKPT if to_mindformers else WEIGHTS, force)
    sizes = {one.name: (one.shape, np.dtype(dtype or one.dtype)) for one in parameters}
    heads = model.num_attention_heads
    tensors = tensors_of(_read(parameters, sizes, progress), places, heads)
    try:
        with filling(destination) as new:
            if to_mindformers:
                arguments = mindformers_arguments(model, config, dtype or _main_dtype(parameters))
                write_json(new / MINDFORMERS_CONFIG, arguments)
                save_ckpt(new / CKPT, tensors)
            else:
                save_safetensors(new / WEIGHTS, sizes_of(sizes, places), tensors)
            write_json(new / "config.json", config)
            if gguf is not None:
                write_gguf_tokenizer(gguf, new)
            for name in FILES_READ if gguf is None else ():
                for beside in (config_file.parent, folder):  # the latter replaces the former
                    for file in filter(Path.is_file, beside.glob(name)):
                        copy = new / file.relative_to(beside)
                        copy.parent.mkdir(exist_ok=True)
                        shutil.copyfile(file, copy)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there; the config.json of the model in Hugging Face layout is needed, "
            "beside the weights or named with --config (MindFormers' yaml cannot stand in for it)"
        )
    return read_json_object(path)


def _check_destination(folder: Path, weights: str, force: bool) -> None:
    """Raises `CheckpointError` for existing files that must not be replaced or hidden."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is there already, and is not a folder")
    names = sorted(path.name for path in folder.iterdir())
    if names and not force:
        raise CheckpointError(f"{folder} has files in it already; --force replaces them")
    # Other weights would stay next to the new ones, and a reader could prefer them.
    for name in names:
        if name != weights and name.endswith(WEIGHT_FILES):
            raise CheckpointError(
                f"{folder} has other weights, {name}, that --force does not replace"
            )


def _read(
    parameters: list[MatchedParameter], sizes: Sizes, progress: Progress
) -> Iterator[tuple[str, Array]]:
    """Yields names and values, one parameter at a time."""
    for done, parameter in enumerate(parameters):
        progress(done, len(parameters), parameter.name)
        yield parameter.name, parameter.read(sizes[parameter.name][1])


def _main_dtype(parameters: list[MatchedParameter]) -> str:
    """Returns the dtype of the matrices, in which MindFormers keeps the weights."""
    matrices = {str(one.dtype) for one in parameters if len(one.shape) > 1}
    return "float16" if matrices == {"float16"} else "float32"
