"""Which type each matrix of a checkpoint is kept in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glm_multiuser.backends.native.group_packing import GROUP_TYPES
from glm_multiuser.backends.native.packing import STORED

FOUR_BITS = ("q4_0", "q4_1", "q4_k", "int4", "int4_128")


def types_in_groups(stored: Mapping[str, str]) -> dict[str, str]:
    """Name of each matrix -> the type that it is kept in, from what it is stored as: in groups
    where kernels know the type, or widened. Nothing if no matrix is in groups."""
    if not any(dtype in GROUP_TYPES for dtype in stored.values()):
        return {}
    known = {*GROUP_TYPES, *STORED}
    return {name: dtype if dtype in known else "float32" for name, dtype in stored.items()}


def types_for_int4(
    stored: Mapping[str, str], inputs: Mapping[str, int], tables: Collection[str]
) -> dict[str, str]:
    """Name of each matrix -> the type that it is kept in with `weight_dtype="int4"`.

    Those that are stored in groups of 4 bits stay as they are, and of `tables`, the embedding and
    the output layer, those in any groups; other tables get 6 bits or 8, because they cost an answer
    the most. The smaller types have blocks of 256 inputs, which not every matrix can be cut into.

    Args:
        inputs: of every matrix.
    """
    kept = {}
    for name, count in inputs.items():
        is_table, dtype = name in tables, stored.get(name, "")
        stays = dtype in (GROUP_TYPES if is_table else FOUR_BITS)
        small, large = ("q6_k", "q8_0") if is_table else ("q4_k", "q4_1")
        fits = count % GROUP_TYPES[small].inputs == 0
        kept[name] = dtype if stays else small if fits else large
    return kept


def described(dtype: str, types: Mapping[str, str]) -> str:
    """Types of matrices, in words: those of `types`, or where it is empty `dtype`."""
    return ", ".join(sorted({*types.values()} or {dtype}))
