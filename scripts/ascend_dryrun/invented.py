"""What the dry run must never let pass."""

from __future__ import annotations

from typing import Any

from mindspore import ops


class Invented(ops.PrimitiveWithInfer):
    """An operator that no device has; it takes a Tensor and returns one like it.

    Args:
        axis: taken because `ops.Softmax` takes it; nothing is computed along it.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__("Invented")
        self.init_prim_io_names(inputs=["x"], outputs=["y"])

    def infer_shape(self, x: Any) -> Any:
        return x

    def infer_dtype(self, x: Any) -> Any:
        return x
