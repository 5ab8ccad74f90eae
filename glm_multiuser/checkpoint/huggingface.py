"""The weight files of a Hugging Face folder: finding them, and reading them tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.checkpoint.stored_tensor import DTYPES, Array, StoredTensor, not_floating
from glm_multiuser.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def has_safetensors(folder: Path) -> bool:
    """Whether `open_folder` finds weights there."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Reads the headers of a folder's weight files, and no weights.

    Raises:
        CheckpointError: no weight file, one that is missing, broken or cut short, or a tensor
            that is not stored as floating-point numbers.
    """
    folder = Path(folder)
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists():
        return _open_file(single)
    if index.exists():
        return _open_shards(index)
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in pytorch_model*.bin only; "
            f"this version reads {WEIGHTS} (or {INDEX} and the files that it names)"
        )
    raise CheckpointError(f"no weights in {folder}: none of {WEIGHTS}, {INDEX}, *.ckpt is there")


def read_tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Reads every tensor of a folder, one at a time, in the checkpoint's own names and layouts.

    Yields:
        Name and values; float16, float32 or float64 mapped from the file, bfloat16 as float32.

    Raises:
        CheckpointError: see `open_folder`.
    """
    for name, tensor in open_folder(folder).items():
        yield name, tensor.read()


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"weight_map in {index} is {shard_of!r}; it must name the tensors")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} has {name} in {shard!r}, which is not a file beside it")
        if shard not in shards:
            if not index.with_name(shard).exists():
                raise CheckpointError(f"{index} names {shard}, which is not there")
            shards[shard] = _open_file(index.with_name(shard))
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} has {name} in {shard}, but that file has no such tensor"
            )
        tensors[name] = shards[shard][name]
    return tensors


def _open_file(path: Path) -> dict[str, StoredTensor]:
    try:
        # Checks the header, and that its tensors fill the file exactly ...
        with safe_open(path, framework="numpy"):
            pass
        # ... but knows neither bfloat16 nor a way to read without copying.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is broken, cut short or not a safetensors file: {error}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise not_floating(name, path, entry["dtype"])
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(
            name=name,
            path=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            parts=((8 + length + begin, end - begin),),
        )
    return tensors
