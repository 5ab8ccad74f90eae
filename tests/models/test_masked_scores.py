"""Positions that a row must not see, however large their scores are."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from glm_multiuser.backends.portable.attention import MASKED, ScaledSoftmax


@pytest.mark.parametrize("size", [1.0, 5800.0, 25_000.0])
def test_masked_positions_have_no_weight(size: float) -> None:
    """Qwen2 7B has scores beyond 5,790."""
    scores = np.array([-size, -size, size, size], np.float32).reshape(1, 1, 1, 4)
    mask = np.array([0, 0, MASKED, MASKED], np.float32).reshape(1, 1, 1, 4)
    weights = ScaledSoftmax(None, "float32", "float32")(ms.Tensor(scores), ms.Tensor(mask))
    assert weights.asnumpy().ravel().tolist() == [0.5, 0.5, 0.0, 0.0]
