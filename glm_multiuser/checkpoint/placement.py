"""Maps a checkpoint's tensors to the model's parameters and back: names, rows and row order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Optional

import numpy as np

from glm_multiuser import bfloat16
from glm_multiuser.checkpoint.stored_tensor import Array, RowIndex, Sizes, StoredTensor
from glm_multiuser.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape, in our layout."""

BLOCK_BYTES = 1 << 22
"""Bytes converted at a time, so that a large tensor is not in memory twice."""


class Placement(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    name: str
    """Our parameter's name."""
    rows: Optional[tuple[int, int]] = None
    """Begin and end of the parameter's outputs; None for the whole parameter."""
    per_head: bool = False
    """Whether the tensor groups outputs by head; we group by query, key, value."""
    interleaved_heads: int = 0
    """If not 0, the number of heads whose two halves alternate row by row in the tensor: llama.cpp
    rotates neighbours, Llama rotates the two halves."""

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Returns the shape of the stored tensor for parameters of these shapes."""
        shape = shapes[self.name]
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])


Places = Mapping[str, Optional[Placement]]
"""Name in a checkpoint -> placement; None for known tensors that the model does not need."""


def place_tensor(parameter: Array, place: Placement, heads: int, tensor: StoredTensor) -> None:
    """Copies a checkpoint's tensor into our parameter, converting to the parameter's dtype.

    Args:
        parameter: in our layout, [out, in] or [out] or the embedding's [vocab, hidden]; of a
            floating type, or `bfloat16.BITS`.
        heads: attention heads, for `per_head`.
        tensor: of the right shape.

    Raises:
        CheckpointError: values that are not finite; a file that changed.
        FloatingPointError: values that bfloat16 cannot hold.
    """
    target = _in_their_order(parameter, place, heads)
    row, bits = math.prod(target.shape[1:]), parameter.dtype == bfloat16.BITS
    step = max(1, BLOCK_BYTES // max(1, row * 4))
    for begin in range(0, len(target), step):
        block = target[begin : begin + step]
        numbers = tensor.numbers(begin * row, begin * row + block.size, bits)
        rounded = bfloat16.to_bfloat16(numbers) if bits and tensor.dtype != "BF16" else numbers
        np.copyto(block, rounded.reshape(block.shape), casting="same_kind")
        if not bfloat16.is_finite(block):
            if bfloat16.is_finite(numbers):
                raise FloatingPointError("overflow")  # as numpy does for its own types
            raise CheckpointError(f"{tensor.name} in {tensor.path} has values that are not finite")


def rows_of_tensor(place: Placement, heads: int, begin: int, end: int, rows: int) -> RowIndex:
    """Returns the rows of a checkpoint's tensor of `rows` rows for rows `begin` to `end` of our
    parameter, counted from the first one that the tensor fills."""
    if not place.per_head and not place.interleaved_heads:
        return slice(begin, end)
    ours = _in_their_order(np.arange(rows), place._replace(rows=None), heads).reshape(-1)
    return np.argsort(ours)[begin:end]


def to_their_layout(parameter: Array, place: Placement, heads: int) -> Array:
    """Inverts `place_tensor`, with the dtype unchanged: returns the checkpoint's tensor."""
    rows = np.ascontiguousarray(_in_their_order(parameter, place, heads))
    return rows.reshape(-1, *parameter.shape[1:])


def tensors_of(
    parameters: Iterable[tuple[str, Array]], places: Places, heads: int
) -> Iterator[tuple[str, Array]]:
    """Yields names and values of a checkpoint's tensors, parameter by parameter."""
    for parameter, values in parameters:
        for name, place in places.items():
            if place is not None and place.name == parameter:
                yield name, to_their_layout(values, place, heads)


def sizes_of(parameters: Sizes, places: Places) -> Sizes:
    """Returns the sizes of the tensors that `tensors_of` yields for these parameters."""
    shapes = {name: shape for name, (shape, _) in parameters.items()}
    return {
        name: (place.shape(shapes), parameters[place.name][1])
        for name, place in places.items()
        if place is not None
    }


def _in_their_order(parameter: Array, place: Placement, heads: int) -> Array:
    """Returns a view with the outputs in the checkpoint's order.

    [heads, 3, head_dim, ...] if grouped, [heads, head_dim / 2, 2, ...] if interleaved.
    """
    rows = parameter if place.rows is None else parameter[slice(*place.rows)]
    if place.interleaved_heads:
        return rows.reshape(place.interleaved_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2)
    return rows.reshape(3, heads, -1, *rows.shape[1:]).swapaxes(0, 1) if place.per_head else rows
