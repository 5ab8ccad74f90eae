"""Indexes and writes MindSpore's `.ckpt` files.

The file is one protobuf message, described by `mindspore/train/checkpoint.proto`:

    message Checkpoint  { repeated Value value = 1; }
    message Value       { required string tag = 1;  TensorProto tensor = 2; }  // tag: the name
    message TensorProto { repeated int64 dims = 1;  required string tensor_type = 2;
                          required bytes tensor_content = 3; }

A large tensor is split into several values with the same tag, each with a part of the content.

`mindspore.load_checkpoint` is not used for reading: it needs more than twice the file's size in
memory, and does not check content against dims: short content is padded with zeros, long content
is written beyond the end of the tensor.
"""

from __future__ import annotations

import math
import mmap
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

import numpy as np

from glm_multiuser.checkpoint.files import reading, replacing
from glm_multiuser.checkpoint.stored_tensor import DTYPES, Array, StoredTensor, not_floating
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.errors import CheckpointError

OUR_DTYPES = {"Float64": "F64", "Float32": "F32", "Float16": "F16", "BFloat16": "BF16"}
"""MindSpore's dtype name -> `StoredTensor`'s."""

WHOLE_NUMBER, BYTES = 0, 2
"""Protobuf's wire types."""

COPY_BYTES = 1 << 24


def find_ckpt(source: Path) -> list[Path]:
    """Returns the `.ckpt` files of a folder, or `source` itself if it is one."""
    return [source] if source.is_file() else sorted(source.glob("*.ckpt"))


def open_ckpt(files: Sequence[Path], ignored: re.Pattern[str]) -> dict[str, StoredTensor]:
    """Finds the tensors of a checkpoint in one or several files, without reading weights.

    Names that match `ignored` are not weights; such values may have any type, and repeat.

    Raises:
        CheckpointError: an unreadable, broken or truncated file; a tensor that is in two files, or
            not stored as floating-point numbers.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _open_file(path, ignored).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is both in {tensors[name].path} and in {path}; "
                    "a folder can hold one checkpoint, in one file or in pieces"
                )
            tensors[name] = tensor
    return tensors


def _open_file(path: Path, ignored: re.Pattern[str]) -> dict[str, StoredTensor]:
    try:
        with (
            reading(path),
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _tensors(path, data, ignored)
    except (KeyError, ValueError) as error:  # a field is missing, or the bytes make no sense
        cause = f"field {error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{path} is broken, cut short, encrypted or not a MindSpore checkpoint: {cause}"
        ) from error


def _tensors(path: Path, data: mmap.mmap, ignored: re.Pattern[str]) -> dict[str, StoredTensor]:
    # `save_checkpoint(..., crc_check=True)` appends this word and ten bytes.
    end = len(data) - 17 if data[-17:-10] == b"crc_num" else len(data)
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, list[tuple[int, int]]] = {}
    for number, begin, after in _fields(data, 0, end):
        if number != 1:
            raise ValueError(f"a checkpoint has no field {number}")
        value = {field: span for field, *span in _fields(data, begin, after)}
        name = data[slice(*value[1])].decode()
        if ignored.search(name):
            continue
        tensor = _tensor(name, path, data, *value[2])
        if tensor is None:
            continue
        tensors[name] = tensor
        parts.setdefault(name, []).extend(tensor.parts)
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(parts=tuple(parts[name]))
        found = sum(length for _, length in parts[name])
        needed = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        if found != needed:
            raise CheckpointError(
                f"{tensor.name} in {path} has {found} bytes; its shape {list(tensor.shape)} "
                f"needs {needed}"
            )
    return tensors


def _tensor(
    name: str, path: Path, data: mmap.mmap, begin: int, after: int
) -> Optional[StoredTensor]:
    """Returns one value's tensor, or None for text appended to the file."""
    dims: list[int] = []
    fields = {}
    for number, *span in _fields(data, begin, after):
        if number == 1:
            dims.append(_varint(data, *span)[0])
        else:
            fields[number] = span
    dtype = data[slice(*fields[2])].decode()
    if dtype == "str":
        return None
    if dtype not in OUR_DTYPES:
        raise not_floating(name, path, dtype)
    begin, after = fields[3]
    shape = () if dims == [0] else tuple(dims)  # [0] is another way to write a scalar
    return StoredTensor(name, path, OUR_DTYPES[dtype], shape, ((begin, after - begin),))


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the number of each field of a message, and where its content begins and ends.

    Raises:
        ValueError: there is no message from `begin` to `end`.
    """
    while begin < end:
        key, begin = _varint(data, begin, end)
        number, wire_type = key >> 3, key & 7
        if wire_type == BYTES:
            length, begin = _varint(data, begin, end)
            after = begin + length
        elif wire_type == WHOLE_NUMBER:
            _, after = _varint(data, begin, end)
        else:
            raise ValueError(f"wire type {wire_type} at {begin}")
        if after > end:
            raise ValueError(f"a field of {after - begin} bytes at {begin}")
        yield number, begin, after
        begin = after


def _varint(data: mmap.mmap, begin: int, end: int) -> tuple[int, int]:
    """Returns the varint at `begin` (seven bits per byte), and the position after it.

    Raises:
        ValueError: it does not end before `end`.
    """
    value = 0
    for place, byte in enumerate(data[begin : min(begin + 10, end)]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, begin + place + 1
    raise ValueError(f"a whole number without an end at {begin}")


def save_ckpt(path: Path, tensors: Iterable[tuple[str, Array]]) -> None:
    """Writes a `.ckpt` file, complete or not at all.

    Each tensor is saved to a separate file, and the files are concatenated, which is how protobuf
    joins repeated fields. So memory holds a few copies of one tensor, not a checkpoint.
    """
    with TemporaryDirectory(dir=path.parent) as folder, replacing(path) as temporary:
        part = Path(folder) / "part.ckpt"
        with temporary.open("wb") as whole:
            for name, values in tensors:
                DEVICE_THREAD.call(partial(_save, part, name, values))
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, COPY_BYTES)


def _save(path: Path, name: str, values: Array) -> None:
    from mindspore import Tensor, save_checkpoint  # late: reading does without MindSpore

    save_checkpoint([{"name": name, "data": Tensor(np.ascontiguousarray(values))}], str(path))
