"""NaN in the memory of a slot, for whoever should not read it."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor


def fill_with_nan(runner: Any, slot: int) -> None:
    """Keys and values of all layers and positions; on the device thread."""
    if runner.kernels == "portable":
        for block, zeros in enumerate(runner._zeros):
            runner._replace(slot, block, Tensor(np.full(zeros.shape, np.nan, np.float32)))
        return
    for layer in runner.model.layer_cells():
        past = layer.kv_past[slot]
        for parameter in (past.key_past, past.value_past):
            parameter.set_data(Tensor(np.full(parameter.shape, np.nan, np.float32)))
