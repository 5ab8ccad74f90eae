"""Pads decode batches so that a row's bits do not depend on the number of rows.

Matrix kernels process tiles of a few rows, accumulate a remainder in a different order, and may
divide work between threads differently for other row counts. So the same row can differ in its last
bits between a product of 8 rows and one of 32. Padding every decode batch to a row count for which
all rows get the same bits removes the difference. These row counts depend on the machine and on the
shapes of the model, so they are measured once, when an engine starts.
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
"""Row counts to try above a batch size; tiles have fewer rows than this."""


def invariant_rows(model: MultiUserModel, sizes: Sequence[int]) -> dict[int, int]:
    """Batch size -> rows to compute: the fewest for which every row gets the same bits.

    Args:
        model: one linear layer of each shape is measured.
        sizes: batch sizes. The largest defines the bits; a smaller one that cannot reproduce them
            with fewer rows uses the same row count.
    """
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, Linear)]
    linears = {cell.weight.shape: cell for cell in cells}.values()
    random = np.random.default_rng(0)
    inputs = [
        random.standard_normal((1, linear.weight.shape[1])).astype(linear.weight.asnumpy().dtype)
        for linear in linears
    ]

    def bits(rows: int) -> Iterator[Optional[NDArray[Any]]]:
        """The result of each product for `rows` equal rows, or None if results differ."""
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
