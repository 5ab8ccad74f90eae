"""NaN in the memory of a slot that must not be read."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from glm_multiuser.engine.native import read_cache, write_cache


def fill_with_nan(runner: Any, slot: int) -> None:
    """Keys and values of all layers and positions; on the device thread."""
    if runner.kernels == "portable":
        for block, zeros in enumerate(runner._zeros):
            runner._replace(slot, block, Tensor(np.full(zeros.shape, np.nan, np.float32)))
        return
    past = read_cache(runner.model, slot, runner.engine.seq_length)
    write_cache(runner.model, slot, [np.full_like(one, np.nan) for one in past])
