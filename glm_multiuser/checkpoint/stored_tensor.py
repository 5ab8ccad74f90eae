"""A tensor in a weight file of any format, read on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import bfloat16
from glm_multiuser.errors import CheckpointError

Array = NDArray[Any]

RowIndex = Union[slice, NDArray[np.intp]]
"""Rows of a tensor, along its first axis: a range, or indices."""

Sizes = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Tensor name -> shape and dtype."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": bfloat16.BITS,  # read as float32, unless `bits` is set
}
"""Types of stored weights. Integers are excluded: they mean a quantised checkpoint, and need scales
that the published code keeps elsewhere."""

ALL_DTYPES: dict[str, np.dtype[Any]] = {**DTYPES, "I32": np.dtype("<i4")}
"""Also that of the parts of quantised weights."""

CACHED_VALUES = 1 << 17
"""Values dequantised at a time: with the intermediate results, they fit into a cache."""


def byte_size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * dtype.itemsize


class BlockType(NamedTuple):
    """A quantised type, stored in blocks of `values` values and `bytes` bytes."""

    name: str
    values: int
    bytes: int
    dequantise: Callable[[Array], Array]
    """uint8 [blocks, bytes] -> float32 [blocks, values]."""


class StoredTensor(NamedTuple):
    """One tensor of a weight file, not read yet."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...] = ()
    """Offset in the file and number of bytes; usually one part, but some formats split large
    tensors. The total is exactly the size of dtype and shape."""
    mapped: Optional[Array] = None
    """Its bytes instead, for formats whose library maps the file."""
    block_type: Optional[BlockType] = None
    """Its type if it is quantised; then `dtype` is the type's name."""
    made: Optional[Callable[[int, int], Array]] = None
    """Computes the bytes of rows (begin, end), for tensors that are not stored in this form."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype that reading returns."""
        if self.dtype == "BF16" or self.block_type is not None:
            return np.dtype("<f4")
        return ALL_DTYPES[self.dtype]

    def read(self) -> Array:
        """Reads all values; see `numbers`."""
        return self.numbers(0, math.prod(self.shape)).reshape(self.shape)

    def numbers(self, begin: int, end: int, bits: bool = False) -> Array:
        """Reads values `begin` to `end` of the flattened tensor.

        Returns:
            Mapped from the file (read-only), or a new array if in parts; quantised values as
            float32, and bfloat16 as well, unless `bits` keeps it as it is.

        Raises:
            CheckpointError: the file changed since it was opened.
        """
        if self.block_type is not None:
            block = self.block_type
            first, after = begin // block.values, -(-end // block.values)
            values = _dequantised(block, self._bytes(first * block.bytes, after * block.bytes))
            return values[begin - first * block.values : end - first * block.values]
        stored_as = ALL_DTYPES[self.dtype]
        stored: Array = self._bytes(begin * stored_as.itemsize, end * stored_as.itemsize)
        stored = stored.view(stored_as)
        return bfloat16.from_bfloat16(stored) if self.dtype == "BF16" and not bits else stored

    def rows(self, index: RowIndex, bits: bool = False) -> Array:
        """Reads some rows, [rows, ...]; types and errors as `numbers`."""
        row = math.prod(self.shape[1:])
        if isinstance(index, slice):
            numbers = self.numbers(index.start * row, index.stop * row, bits)
        elif self.block_type is not None:
            blocks = math.prod(self.shape) // self.block_type.values
            stored = self._bytes(0, blocks * self.block_type.bytes).reshape(self.shape[0], -1)
            numbers = _dequantised(self.block_type, stored[index])
        else:
            numbers = self.numbers(0, math.prod(self.shape), bits).reshape(-1, row)[index]
        return numbers.reshape(-1, *self.shape[1:])

    def blocks(self, index: RowIndex) -> Array:
        """Reads some rows of a quantised tensor as stored, uint8 [rows, blocks, bytes]; raises as
        `numbers`."""
        if self.block_type is None:
            raise ValueError(f"{self.name} has no blocks")
        size, count = self.block_type.bytes, self.shape[-1] // self.block_type.values
        some = index if isinstance(index, slice) else slice(0, self.shape[0])
        stored = self._bytes(some.start * count * size, some.stop * count * size)
        stored = stored.reshape(-1, count, size)
        return stored if isinstance(index, slice) else stored[index]

    def _bytes(self, begin: int, end: int) -> Array:
        if self.mapped is not None:
            return self.mapped[begin:end]
        if self.made is not None and self.block_type is not None:
            row = self.shape[-1] // self.block_type.values * self.block_type.bytes
            first = begin // row
            made = self.made(first, -(-end // row)).reshape(-1)
            return made[begin - first * row : end - first * row]
        pieces = []
        for offset, length in self.parts:
            first, after = max(begin, 0), min(end, length)
            if first < after:
                try:
                    piece = np.memmap(self.path, np.uint8, "r", offset + first, (after - first,))
                except (OSError, ValueError) as error:
                    raise CheckpointError(
                        f"cannot read {self.name} from {self.path}: {error}"
                    ) from error
                pieces.append(np.asarray(piece))
            begin, end = begin - length, end - length
        if not pieces:
            return np.empty(0, np.uint8)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _dequantised(block: BlockType, content: Array) -> Array:
    """Dequantises whole blocks to a flat array."""
    content = content.reshape(-1, block.bytes)
    values = np.empty((len(content), block.values), np.float32)
    step = CACHED_VALUES // block.values
    with np.errstate(invalid="ignore"):  # an infinite scale: the caller checks the values
        for place in range(0, len(content), step):
            values[place : place + step] = block.dequantise(content[place : place + step])
    return values.reshape(-1)


def not_floating(name: str, path: Path, dtype: str) -> CheckpointError:
    """Returns the error for a tensor that is not stored as one of `DTYPES`."""
    return CheckpointError(
        f"{name} in {path} is stored as {dtype}; "
        f"{', '.join(DTYPES)} can be read, quantised weights cannot"
    )
