"""How many rows a decode graph computes, so that a row's bits do not depend on how many there are.

Matrix kernels work on tiles of a few rows and add up a remainder in another order, and they may
split work over threads in another way for other heights. So the same row can differ in its last
bits between a product of 8 rows and one of 32. Padding every decode batch to a height whose rows
all get the same bits removes the difference. Which heights do is a property of the machine and of
the shapes of the model, so it is measured, once, when an engine starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.models.layers import Linear

TRIES = 16
"""Heights to try above a batch size; tiles are lower than this."""


def invariant_rows(linears: Sequence[Linear], sizes: Sequence[int]) -> dict[int, int]:
    """Batch size -> rows to compute: the fewest for which every row gets the same bits.

    Args:
        linears: one of each shape that the model multiplies rows with.
        sizes: batch sizes. The largest sets the bits; a smaller one that cannot reproduce them
            with fewer rows is computed with as many as the largest.
    """
    random = np.random.default_rng(0)
    inputs = [
        random.standard_normal((1, linear.weight.shape[1])).astype(linear.weight.asnumpy().dtype)
        for linear in linears
    ]

    def bits(number: int, rows: int) -> Optional[NDArray[Any]]:
        """What one product makes of `rows` equal rows, or None if it makes them differ."""
        result = linears[number](Tensor(np.repeat(inputs[number], rows, axis=0))).asnumpy()
        return result[0] if (result == result[0]).all() else None

    def agrees(rows: int, reference: Sequence[Optional[NDArray[Any]]]) -> bool:
        for number, expected in enumerate(reference):
            found = bits(number, rows)
            if found is None or (expected is not None and not (found == expected).all()):
                return False
        return True

    largest = max(sizes)
    nothing: list[Optional[NDArray[Any]]] = [None] * len(linears)
    heights = range(largest, largest + TRIES)
    largest_rows = next((rows for rows in heights if agrees(rows, nothing)), largest)
    reference = [bits(number, largest_rows) for number in range(len(linears))]
    chosen = {largest: largest_rows}
    for size in sorted(sizes)[:-1]:
        heights = range(size, min(size + TRIES, largest_rows))
        chosen[size] = next((rows for rows in heights if agrees(rows, reference)), largest_rows)
    return chosen
