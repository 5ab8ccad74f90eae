"""An operator that the dry run must reject."""

from __future__ import annotations

from typing import Any

from mindspore import ops


class Invented(ops.PrimitiveWithInfer):
    """An operator that no device implements; takes a Tensor and returns one like it.

    Args:
        axis: unused; for the signature of `ops.Softmax`.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__("Invented")
        self.init_prim_io_names(inputs=["x"], outputs=["y"])

    def infer_shape(self, x: Any) -> Any:
        return x

    def infer_dtype(self, x: Any) -> Any:
        return x
