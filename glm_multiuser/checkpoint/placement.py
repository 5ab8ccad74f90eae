"""From tensors of a checkpoint to the model's parameters and back: names, rows and their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Optional

import numpy as np

from glm_multiuser.checkpoint.stored_tensor import Array, StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> its shape, in our layout."""

BLOCK_BYTES = 1 << 22
"""What is converted at a time, so that a large tensor is not in memory twice."""


class Placement(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    name: str
    """Our parameter's name."""
    rows: Optional[tuple[int, int]] = None
    """From and up to which of the parameter's outputs; None: it is the whole parameter."""
    per_head: bool = False
    """Its outputs are grouped by head there and by query, key, value here."""

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Of the stored tensor, if parameters have these shapes."""
        shape = shapes[self.name]
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])


Places = Mapping[str, Optional[Placement]]
"""Name in a checkpoint -> its place; None: known, and not needed for the model."""


def place_tensor(parameter: Array, place: Placement, heads: int, tensor: StoredTensor) -> None:
    """Copies a checkpoint's tensor into our parameter, and converts it to that one's dtype.

    Args:
        parameter: with our layout, [out, in] or [out] or the embedding's [vocab, hidden].
        place: of the tensor.
        heads: attention heads, for what is grouped by them.
        tensor: of the right shape.
    """
    target = _in_their_order(_rows(parameter, place), place, heads)
    row = math.prod(target.shape[1:])
    step = max(1, BLOCK_BYTES // max(1, row * 4))
    for begin in range(0, len(target), step):
        block = target[begin : begin + step]
        numbers = tensor.numbers(begin * row, begin * row + block.size)
        np.copyto(block, numbers.reshape(block.shape), casting="same_kind")


def to_their_layout(parameter: Array, place: Placement, heads: int) -> Array:
    """The inverse of `place_tensor`, with the dtype unchanged: the tensor for a checkpoint."""
    rows = _rows(parameter, place)
    return np.ascontiguousarray(_in_their_order(rows, place, heads)).reshape(rows.shape)


def _rows(parameter: Array, place: Placement) -> Array:
    return parameter if place.rows is None else parameter[slice(*place.rows)]


def _in_their_order(rows: Array, place: Placement, heads: int) -> Array:
    """A view whose outputs come in the checkpoint's order, [heads, 3, head_dim, ...] if grouped."""
    return rows.reshape(3, heads, -1, *rows.shape[1:]).swapaxes(0, 1) if place.per_head else rows
