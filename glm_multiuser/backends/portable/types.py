"""The compute types of the portable cells, in MindSpore and in NumPy."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16}


def tensor_type(dtype: str) -> ms.dtype.Type:
    """The MindSpore type of this name."""
    return getattr(ms, dtype)


def numpy_type(dtype: ms.dtype.Type) -> np.dtype[Any]:
    """The NumPy type of the same name."""
    return np.dtype(str(dtype).lower())


def zeros(*shape: int, dtype: str) -> Tensor:
    return Tensor(np.zeros(shape, NUMPY_TYPES[dtype]))
