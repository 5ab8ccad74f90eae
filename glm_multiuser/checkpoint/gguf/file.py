"""Reads the metadata of GGUF files and finds their tensors.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian) is

    "GGUF"  uint32 version  uint64 number of tensors  uint64 number of metadata
    metadata: string key, uint32 type, value
    tensors:  string name, uint32 number of dimensions, uint64 each, innermost first, uint32 type,
              uint64 offset from where the data begin
    data:     begin at the next multiple of `general.alignment`

A string is its length as uint64 and UTF-8; an array is its items' type as uint32, their number as
uint64, and the items. A large model may be split into several files; the first has all metadata.

The package `gguf` is not used: it accepts inconsistent files, and a corrupt count makes it allocate
any amount of memory.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from glm_multiuser.checkpoint.files import reading
from glm_multiuser.checkpoint.gguf.blocks import BLOCK_TYPES
from glm_multiuser.checkpoint.stored_tensor import DTYPES, Array, BlockType, StoredTensor
from glm_multiuser.errors import CheckpointError

MAGIC = b"GGUF"
SUFFIX = ".gguf"

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a split file, with its number, from 1, and their count."""

VERSIONS = (2, 3)

MOST_ENTRIES, MOST_STRINGS = 1 << 16, 1 << 21
"""Limits of metadata and tensors, and of an array: above every model, and read in a second."""

LONGEST_NAME = 1 << 16
"""Bytes of a key or of a tensor's name."""

MOST_DIMENSIONS = 4

STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd"))
"""Metadata type number -> `struct` code."""

PLAIN_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
"""Tensor type number -> `StoredTensor`'s dtype."""

OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0"},
    **{35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
"""Unsupported types, for messages; `enum ggml_type` in ggml.h has all."""


class Strings(NamedTuple):
    """An array of strings, read lazily: a vocabulary has hundreds of thousands."""

    path: Path
    key: str
    number: int
    """Number of strings."""
    begin: int
    end: int

    def read(self) -> list[str]:
        """Reads them; raises CheckpointError if one is not UTF-8, or the file changed."""
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.begin)
            data = file.read(self.end - self.begin)
        found, at = [], 0
        try:
            for _ in range(self.number):
                (length,) = LENGTH.unpack_from(data, at)
                at += LENGTH.size + length
                found.append(data[at - length : at].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.key} of {self.path} is broken: {error}") from None
        return found


class GGUFFile(NamedTuple):
    """The metadata of a file, and its tensors."""

    path: Path
    metadata: dict[str, Any]
    """Numbers, strings, numpy arrays of numbers, and `Strings`."""
    tensors: dict[str, StoredTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Reads the metadata of a model in one or several files, without its weights.

    Args:
        path: any of the files.

    Raises:
        CheckpointError: a missing, unreadable, broken or truncated file, one that is inconsistent
            in itself or with the others, or a tensor of an unsupported type.
    """
    name = PART.fullmatch(path.name)
    count = int(name[3]) if name else 0
    if name is None or count < 1:
        return _part(path, 0, 1)
    paths = [path.with_name(f"{name[1]}-{one + 1:05}-of-{name[3]}{SUFFIX}") for one in range(count)]
    first = _part(paths[0], 0, count)
    for number in range(1, count):
        other = _part(paths[number], number, count)
        twice = first.tensors.keys() & other.tensors.keys()
        if twice:
            raise CheckpointError(f"{min(twice)} is both in {other.path} and in an earlier part")
        first.tensors.update(other.tensors)
    total = _whole(first, "split.tensors.count", len(first.tensors))
    if total != len(first.tensors):
        raise CheckpointError(
            f"split.tensors.count of {first.path} is {total}; its parts have {len(first.tensors)}"
        )
    return first


def _part(path: Path, number: int, count: int) -> GGUFFile:
    """Reads the file that by its name is number `number`, from 0, of `count`."""
    file = _open(path)
    found = _whole(file, "split.no", number), _whole(file, "split.count", count) or 1
    if found != (number, count):
        raise CheckpointError(
            f"{path} has split.no {found[0]} and split.count {found[1]}; by its name they are "
            f"{number} and {count}, which is name-00001-of-0000N{SUFFIX} for the first of N files"
        )
    return file


def _whole(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"{key} of {file.path} is {value!r}; it must be a whole number")
    return value


def _open(path: Path) -> GGUFFile:
    with reading(path), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file: it does not begin with {MAGIC!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(path, data).read()
            except (struct.error, UnicodeDecodeError, _Broken) as error:
                raise CheckpointError(f"{path} is broken or cut short: {error}") from None


class _Broken(Exception):
    """Describes a broken file."""


class _Reader:
    """Reads a file sequentially."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = len(MAGIC)

    def read(self) -> GGUFFile:
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big")
            hint = ", in the byte order of another machine" if swapped in VERSIONS else ""
            raise CheckpointError(
                f"{self.path} has version {version}{hint}; versions {VERSIONS} can be read"
            )
        counts = self.number("Q"), self.number("Q")
        for what, count in zip(("tensors", "metadata"), counts):
            self.check_at_most(f"the number of {what}", count, MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(counts[1]):
            key = self.string(LONGEST_NAME)
            if key in metadata:
                raise _Broken(f"{key} is there twice")
            metadata[key] = self.value(key, self.number("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _Broken(f"general.alignment is {alignment!r}; it must be a power of two")
        entries = [self.entry() for _ in range(counts[0])]
        begin = -(-self.at // alignment) * alignment
        return GGUFFile(self.path, metadata, self.tensors(entries, begin, alignment))

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self, longest: Optional[int] = None) -> str:
        length: int = self.number("Q")
        self.check_at_most("the length of a string", length, longest or len(self.data))
        if self.at + length > len(self.data):
            raise _Broken(f"a string of {length} bytes at {self.at} goes beyond its end")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, key: str, kind: int) -> Union[bool, int, float, str, Strings, Array]:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key, self.number("I"), self.number("Q"))
        if kind not in NUMBERS:
            raise _Broken(f"{key} has the unknown type {kind}")
        value = self.number(NUMBERS[kind])
        # The shortest decimal, as in a config.json: 1e-05 instead of 9.99999974e-06.
        return float(str(np.float32(value))) if NUMBERS[kind] == "f" else value

    def array(self, key: str, kind: int, count: int) -> Union[Strings, Array]:
        if kind == STRING:
            self.check_at_most(f"the number of strings of {key}", count, MOST_STRINGS)
            return self.strings(key, count)
        if kind not in NUMBERS:
            raise _Broken(f"{key} is an array of the type {kind}, which is unknown or an array")
        dtype = np.dtype(NUMBERS[kind]).newbyteorder("<")
        if count * dtype.itemsize > len(self.data) - self.at:
            raise _Broken(f"{key} with {count} numbers goes beyond its end")
        values = np.frombuffer(self.data, dtype, count, self.at).copy()
        self.at += values.nbytes
        return values

    def strings(self, key: str, count: int) -> Strings:
        begin, size = self.at, len(self.data)
        for _ in range(count):
            (length,) = LENGTH.unpack_from(self.data, self.at)
            self.at += LENGTH.size + length
            if self.at > size:
                raise _Broken(f"a string of {key} goes beyond its end")
        return Strings(self.path, key, count, begin, self.at)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads name, shape with the outermost dimension first, type number, and offset."""
        name = self.string(LONGEST_NAME)
        dimensions = self.number("I")
        self.check_at_most(f"the number of dimensions of {name}", dimensions, MOST_DIMENSIONS)
        sizes = tuple(self.number("Q") for _ in range(dimensions))
        return name, sizes[::-1], self.number("I"), self.number("Q")

    def tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int
    ) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        room = len(self.data) - begin
        for name, shape, kind, offset in entries:
            if name in found:
                raise _Broken(f"{name} is there twice")
            dtype, block_type = _type(name, self.path, kind)
            row, size = (1, DTYPES[dtype].itemsize) if block_type is None else block_type[1:3]
            if (shape or (1,))[-1] % row:
                raise _Broken(f"{name} has rows of {shape[-1]}; {dtype} needs a multiple of {row}")
            length = math.prod(shape) // row * size
            if offset % alignment:
                raise _Broken(f"{name} begins at {offset}, no multiple of {alignment}")
            if offset + length > room:
                raise _Broken(
                    f"{name} {list(shape)} takes bytes {offset} to {offset + length} of the data, "
                    f"which have {max(room, 0)}"
                )
            parts = ((begin + offset, length),)
            found[name] = StoredTensor(name, self.path, dtype, shape, parts, block_type=block_type)
        in_order = sorted(found.values(), key=lambda one: one.parts)
        for one, following in zip(in_order, in_order[1:]):
            if sum(one.parts[0]) > following.parts[0][0]:
                raise _Broken(f"{one.name} and {following.name} overlap")
        return found

    def check_at_most(self, what: str, value: int, most: int) -> None:
        if value > most:
            raise _Broken(f"{what} is {value}; it must be at most {most}")


def _type(name: str, path: Path, kind: int) -> tuple[str, Optional[BlockType]]:
    if kind in PLAIN_TYPES:
        return PLAIN_TYPES[kind], None
    if kind not in BLOCK_TYPES:
        known = [*PLAIN_TYPES.values(), *(one.name for one in BLOCK_TYPES.values())]
        raise CheckpointError(
            f"{name} in {path} is stored as {OTHER_TYPES.get(kind, f'type {kind}')}; "
            f"{', '.join(known)} can be read"
        )
    return BLOCK_TYPES[kind].name, BLOCK_TYPES[kind]
