"""A tensor in a weight file, of whatever format: where it lies, and reading it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.errors import CheckpointError

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16: `read` makes float32 of its bits
}
"""What weights may be stored as. Whole numbers are not in it: they mean a quantised checkpoint,
and need scales that ChatGLM-6B's own code keeps elsewhere."""


class StoredTensor(NamedTuple):
    """One tensor of a weight file, not read yet."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    """Where its bytes begin in the file, and how many there are; usually one part, some formats
    cut large tensors. Together they are exactly as many as dtype and shape need."""

    def read(self) -> Array:
        """Its values, mapped from the file (read-only), or new if in parts; bfloat16 as float32.

        Raises:
            CheckpointError: the file changed since it was opened.
        """
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, np.float32)
        try:
            parts = [
                np.asarray(np.memmap(self.path, np.uint8, "r", offset, (length,)))
                for offset, length in self.parts
            ]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.name} from {self.path}: {error}") from error
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        stored: Array = content.view(DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype != "BF16":
            return stored
        # A bfloat16 is the upper half of a float32.
        bits = stored.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)


def not_floating(name: str, path: Path, dtype: str) -> CheckpointError:
    """The error for a tensor that is not stored as one of `DTYPES`."""
    return CheckpointError(
        f"{name} in {path} is stored as {dtype}; "
        f"{', '.join(DTYPES)} can be read, quantised weights cannot"
    )
