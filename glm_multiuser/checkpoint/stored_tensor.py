"""A tensor in a weight file, of whatever format: where it lies, and reading it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.errors import CheckpointError

Array = NDArray[Any]

Sizes = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Name of a tensor -> its shape and dtype."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16: reading makes float32 of its bits
}
"""What weights may be stored as. Whole numbers are not in it: they mean a quantised checkpoint,
and need scales that the published code keeps elsewhere."""


class StoredTensor(NamedTuple):
    """One tensor of a weight file, not read yet."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...] = ()
    """Where its bytes begin in the file, and how many there are; usually one part, some formats
    cut large tensors. Together they are exactly as many as dtype and shape need."""
    mapped: Optional[Array] = None
    """Its bytes instead, of a format whose own library maps the file."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of what reading returns."""
        return np.dtype("<f4") if self.dtype == "BF16" else DTYPES[self.dtype]

    def read(self) -> Array:
        """All its values; see `numbers`."""
        return self.numbers(0, math.prod(self.shape)).reshape(self.shape)

    def numbers(self, begin: int, end: int) -> Array:
        """Some of its values, counted from the first one, in a row.

        Returns:
            Mapped from the file (read-only), or new if they are in parts; bfloat16 as float32.

        Raises:
            CheckpointError: the file changed since it was opened.
        """
        stored_as = DTYPES[self.dtype]
        try:
            pieces = self._bytes(begin * stored_as.itemsize, end * stored_as.itemsize)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.name} from {self.path}: {error}") from error
        if not pieces:
            return np.empty(0, self.numpy_dtype)
        content = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        stored: Array = content.view(stored_as)
        if self.dtype != "BF16":
            return stored
        # A bfloat16 is the upper half of a float32.
        bits = stored.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)

    def _bytes(self, begin: int, end: int) -> list[Array]:
        if self.mapped is not None:
            return [self.mapped[begin:end]] if end > begin else []
        pieces = []
        for offset, length in self.parts:
            first, behind = max(begin, 0), min(end, length)
            if first < behind:
                piece = np.memmap(self.path, np.uint8, "r", offset + first, (behind - first,))
                pieces.append(np.asarray(piece))
            begin, end = begin - length, end - length
        return pieces


def not_floating(name: str, path: Path, dtype: str) -> CheckpointError:
    """The error for a tensor that is not stored as one of `DTYPES`."""
    return CheckpointError(
        f"{name} in {path} is stored as {dtype}; "
        f"{', '.join(DTYPES)} can be read, quantised weights cannot"
    )
