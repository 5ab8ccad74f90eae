"""How many rows a decode graph computes, so that a row's bits do not depend on how many there are.

Matrix kernels work on tiles of a few rows and add up a remainder in another order, and they may
split work over threads in another way for another row count. So the same row can differ in its last
bits between a product of 8 rows and one of 32. Padding every decode batch to a row count whose rows
all get the same bits removes the difference. Which ones do is a property of the machine and of the
shapes of the model, so it is measured, once, when an engine starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.backends.portable.cells import Linear
from glm_multiuser.models.multi_user import MultiUserModel

TRIES = 16
"""Row counts to try above a batch size; tiles are lower than this."""


def invariant_rows(model: MultiUserModel, sizes: Sequence[int]) -> dict[int, int]:
    """Batch size -> rows to compute: the fewest for which every row gets the same bits.

    Args:
        model: one of its linear layers of each shape is measured.
        sizes: batch sizes. The largest sets the bits; a smaller one that cannot reproduce them
            with fewer rows is computed with as many as the largest.
    """
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, Linear)]
    linears = {cell.weight.shape: cell for cell in cells}.values()
    random = np.random.default_rng(0)
    inputs = [
        random.standard_normal((1, linear.weight.shape[1])).astype(linear.weight.asnumpy().dtype)
        for linear in linears
    ]

    def bits(rows: int) -> Iterator[Optional[NDArray[Any]]]:
        """What each product makes of `rows` equal rows, or None if it makes them differ."""
        for linear, row in zip(linears, inputs):
            result = linear(Tensor(np.repeat(row, rows, axis=0)), None).asnumpy()
            yield result[0] if (result == result[0]).all() else None

    def agrees(rows: int, reference: Sequence[Optional[NDArray[Any]]]) -> bool:
        return all(
            found is not None and (expected is None or (found == expected).all())
            for found, expected in zip(bits(rows), reference)
        )

    largest = max(sizes)
    row_counts = range(largest, largest + TRIES)
    anything = [None] * len(linears)
    largest_rows = next((rows for rows in row_counts if agrees(rows, anything)), largest)
    reference = list(bits(largest_rows))
    chosen = {largest: largest_rows}
    for size in sorted(sizes)[:-1]:
        row_counts = range(size, min(size + TRIES, largest_rows))
        chosen[size] = next((rows for rows in row_counts if agrees(rows, reference)), largest_rows)
    return chosen
