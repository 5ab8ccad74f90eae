"""Finds the weight files of a Hugging Face folder, and reads them tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Callable, Optional

from glm_multiuser.checkpoint.files import read_json_object, read_optional
from glm_multiuser.checkpoint.quantised_folder import (
    Quantisation,
    join_tensors,
    read_quantisation,
)
from glm_multiuser.checkpoint.safetensors_file import open_safetensors
from glm_multiuser.checkpoint.stored_tensor import Array, StoredTensor
from glm_multiuser.checkpoint.torch_file import open_torch
from glm_multiuser.errors import CheckpointError, ConfigError

WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"

OpenFile = Callable[[Path], dict[str, StoredTensor]]

FORMATS: dict[str, OpenFile] = {WEIGHTS: open_safetensors, TORCH_WEIGHTS: open_torch}
"""Opens the files of a format, by the name of its single file; otherwise there are shards and an
index."""

SHARDS = {WEIGHTS: "model-*.safetensors", TORCH_WEIGHTS: "pytorch_model-*.bin"}
"""Names of the shards, by the name of the single file."""


def format_of(folder: Path) -> Optional[str]:
    """Returns the first of `FORMATS` that a folder has weights in, or None."""
    present = (one for one in FORMATS if (folder / one).exists() or _index(folder, one).exists())
    return next(present, None)


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights for `open_folder`, including shards without an index."""
    return format_of(folder) is not None or bool(_shards(folder))


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a folder's weight files, without reading weights.

    If there are safetensors, pytorch_model*.bin is ignored. Matrices of AWQ and GPTQ are one
    tensor each, built by `quantised_folder`.

    Raises:
        CheckpointError: no weight file; a missing, broken or truncated one; a tensor that is not
            stored as floating-point numbers; unsupported quantised weights.
    """
    folder = Path(folder)
    found = format_of(folder)
    if found is not None:
        quantisation = _quantisation(folder / "config.json")
        open_file = FORMATS[found]
        if quantisation is not None and found == WEIGHTS:
            open_file = partial(open_safetensors, quantised=True)
        if (folder / found).exists():
            tensors = open_file(folder / found)
        else:
            tensors = _open_shards(_index(folder, found), open_file)
        return join_tensors(tensors, quantisation) if quantisation is not None else tensors
    indices = [_index(folder, one).name for one in FORMATS]
    shards = _shards(folder)
    if shards:
        raise CheckpointError(
            f"{folder} has {shards[0]} and no index: neither {' nor '.join(indices)} is there"
        )
    names = [name for pair in zip(FORMATS, indices) for name in pair]
    raise CheckpointError(f"no weights in {folder}: none of {', '.join(names)}, *.ckpt is there")


def read_tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Reads every tensor of a folder, one at a time, with the checkpoint's names and layouts.

    Yields:
        Name and values: float16, float32 or float64 mapped from the file, bfloat16 as float32.

    Raises:
        CheckpointError: see `open_folder`.
    """
    for name, tensor in open_folder(folder).items():
        yield name, tensor.read()


def _quantisation(path: Path) -> Optional[Quantisation]:
    try:
        return read_quantisation(read_optional(path))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _index(folder: Path, single: str) -> Path:
    return folder / f"{single}.index.json"


def _shards(folder: Path) -> list[str]:
    return sorted(path.name for pattern in SHARDS.values() for path in folder.glob(pattern))


def read_shard_names(index: Path) -> dict[str, str]:
    """Returns the file of every tensor, as an index names them.

    Raises:
        CheckpointError: a broken index, or a name that is not that of a file beside it.
    """
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"weight_map in {index} is {shard_of!r}; it must name the tensors")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(f"{index} has {name} in {shard!r}, which is not a file beside it")
    return shard_of


def _open_shards(index: Path, open_file: OpenFile) -> dict[str, StoredTensor]:
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in read_shard_names(index).items():
        if shard not in shards:
            if not os.path.exists(index.with_name(shard)):  # False for names that are too long
                raise CheckpointError(f"{index} names {shard}, which is not there")
            shards[shard] = open_file(index.with_name(shard))
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} has {name} in {shard}, but that file has no such tensor"
            )
        tensors[name] = shards[shard][name]
    return tensors
