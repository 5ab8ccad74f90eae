"""From a checkpoint in Hugging Face layout to one of MindFormers, and back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from glm_multiuser.checkpoint.ckpt_file import find_ckpt, save_ckpt
from glm_multiuser.checkpoint.glm import (
    CKPT,
    Matched,
    in_range,
    match_ckpt,
    match_huggingface,
    save_safetensors,
)
from glm_multiuser.checkpoint.huggingface import INDEX, WEIGHTS, has_safetensors
from glm_multiuser.checkpoint.json_file import read_json_object, write_json
from glm_multiuser.checkpoint.name_maps import glm_placements, glm_shapes
from glm_multiuser.checkpoint.replacing import filling
from glm_multiuser.checkpoint.stored_tensor import Array
from glm_multiuser.config import ModelConfig
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.mindformers.config import SEQ_LENGTH, glm_config_arguments
from glm_multiuser.progress import Progress
from glm_multiuser.tokenizers import TOKENIZER_FILES

HUGGINGFACE, MINDFORMERS = "huggingface", "mindformers"
OTHER = {HUGGINGFACE: MINDFORMERS, MINDFORMERS: HUGGINGFACE}

MINDFORMERS_CONFIG = "mindformers_config.json"
"""The arguments of MindFormers' `GLMConfig`, apart from the path of the weights."""

COPIED = (*TOKENIZER_FILES, "generation_config.json")


def direction(source: Path, to: Optional[str]) -> str:
    """What `source` is to become: `to`, or else what it is not yet.

    Raises:
        ConfigError: `to` is unknown, or is needed because `source` has weights of both kinds.
        CheckpointError: `source` has no weights to make that from.
    """
    if to not in (None, *OTHER):
        raise ConfigError(f"to is {to!r}; it must be {HUGGINGFACE!r} or {MINDFORMERS!r}")
    targets = []
    if find_ckpt(source):
        targets.append(HUGGINGFACE)
    if has_safetensors(source):
        targets.append(MINDFORMERS)
    if not targets:
        raise CheckpointError(f"no weights at {source}: neither {WEIGHTS} nor a .ckpt file")
    if to is None:
        if len(targets) > 1:
            raise ConfigError(
                f"{source} has both {WEIGHTS} and .ckpt files; say which way with --to"
            )
        return targets[0]
    if to not in targets:
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
    """Writes a folder that this library loads, and MindFormers or Hugging Face's code too.

    In it are the weights, `config.json`, what the source has of the tokenizer's files, and for
    MindFormers the arguments of its `GLMConfig`. Weights keep their bits unless `dtype` says
    otherwise, but bfloat16 becomes float32. Memory holds one tensor at a time; on the way to
    safetensors, all of those that change their dtype.

    Args:
        source: a folder, or a `.ckpt` file.
        destination: a folder; complete in the end, or untouched.
        to: as `direction` returns it.
        dtype: of the new weights, "float16" or "float32"; None: each as it is.
        config_file: None: the `config.json` beside the weights.
        force: whether files in `destination` are replaced.
        progress: told (tensors done, all of them, name of the next one).

    Raises:
        ConfigError: an argument out of its range, or a model that MindFormers cannot compute.
        CheckpointError: a source that `load_glm` would refuse, or a destination that cannot be
            written or must not.
    """
    if dtype not in (None, "float16", "float32"):
        raise ConfigError(f"dtype is {dtype!r}; it must be 'float16' or 'float32'")
    folder = source.parent if source.is_file() else source
    config_file = config_file or folder / "config.json"
    config = _read_config(config_file)
    model = ModelConfig.from_dict(config)
    match = match_ckpt if to == HUGGINGFACE else match_huggingface
    tensors = match(source, model, glm_shapes(model))
    if dtype is not None:
        config["torch_dtype"] = dtype
    _check_destination(destination, WEIGHTS if to == HUGGINGFACE else CKPT, force)
    arrays = _read(tensors, dtype, progress)
    try:
        with filling(destination) as new:
            if to == HUGGINGFACE:
                places = glm_placements(model.num_layers)
                names = {place.name: name for name, place in places.items()}
                their_arrays = {names[name]: values for name, values in arrays}
                progress(len(tensors), len(tensors), f"writing {WEIGHTS}")
                save_safetensors(new / WEIGHTS, their_arrays)
            else:
                seq_length = min(SEQ_LENGTH, model.max_sequence_length)
                arguments = glm_config_arguments(model, seq_length, dtype or _main_dtype(tensors))
                write_json(new / MINDFORMERS_CONFIG, arguments)
                save_ckpt(new / CKPT, arrays)
            write_json(new / "config.json", config)
            _copy_first((folder, config_file.parent), new)
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
    """Raises `CheckpointError` if something is there that must not be replaced, or hidden."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is there already, and is not a folder")
    names = sorted(path.name for path in folder.iterdir())
    if names and not force:
        raise CheckpointError(f"{folder} has files in it already; --force replaces them")
    # Other weights would stay beside the new ones, and a reader could take those.
    for name in names:
        if name != weights and name.endswith((".ckpt", ".safetensors", INDEX)):
            raise CheckpointError(
                f"{folder} has other weights, {name}, that --force does not replace"
            )


def _read(
    tensors: Matched, dtype: Optional[str], progress: Progress
) -> Iterator[tuple[str, Array]]:
    """Our name and the values of one tensor after the other."""
    for done, (place, tensor) in enumerate(tensors):
        progress(done, len(tensors), place.name)
        values = tensor.read()
        if dtype is not None:
            with in_range(tensor, dtype):
                values = values.astype(dtype, copy=False)
        yield place.name, values


def _main_dtype(tensors: Matched) -> str:
    """What MindFormers shall keep the weights in: what the matrices are in."""
    matrices = [tensor.dtype for _, tensor in tensors if len(tensor.shape) > 1]
    return "float16" if set(matrices) == {"F16"} else "float32"


def _copy_first(folders: tuple[Path, ...], destination: Path) -> None:
    """Copies the files of the tokenizer, each from the first folder that has it."""
    for name in COPIED:
        for folder in folders:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, destination / name)
                break
