"""NaN in the memory of a slot that must not be read."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from glm_multiuser.mindspore_internals import memory_of
from glm_multiuser.models.multi_user import MultiUserModel


def fill_with_nan(runner: Any, slot: int) -> None:
    """Poisons keys and values of all layers and positions; runs on the device thread."""
    if runner.kernels == "portable":
        for block, zeros in enumerate(runner._zeros):
            runner._replace(slot, block, Tensor(np.full(zeros.shape, np.nan, np.float32)))
        return
    poison(runner.model, slot)


def poison(model: MultiUserModel, slot: int) -> None:
    """The same with native kernels. All bits set are NaN: in float32, in bfloat16, and in the
    scales of int8."""
    for cell, row in model.caches_of(slot):
        for parameter in (cell.key_past, cell.value_past):
            memory_of(parameter)[row].view(np.uint8)[...] = 0xFF
