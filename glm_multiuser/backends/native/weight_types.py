"""The type in which each matrix of a checkpoint is kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from glm_multiuser.backends.native.group_packing import GROUP_TYPES
from glm_multiuser.backends.native.packing import STORED

FOUR_BITS = ("q4_0", "q4_1", "q4_k", "int4", "int4_128")


def types_in_groups(stored: Mapping[str, str]) -> dict[str, str]:
    """Name of each matrix -> the type in which it is kept: the stored type if the kernels support
    it, otherwise float32. Empty if no matrix is group-quantised."""
    if not any(dtype in GROUP_TYPES for dtype in stored.values()):
        return {}
    known = {*GROUP_TYPES, *STORED}
    return {name: dtype if dtype in known else "float32" for name, dtype in stored.items()}


def types_for_int4(
    stored: Mapping[str, str], inputs: Mapping[str, int], tables: Collection[str]
) -> dict[str, str]:
    """Name of each matrix -> the type in which it is kept with `weight_dtype="int4"`.

    Matrices stored in 4-bit groups keep their type, as do `tables`, the embedding and the output
    layer, stored in groups of any size. Other tables get 6 or 8 bits, because quality depends on
    them most. The smaller types require a multiple of 256 inputs.

    Args:
        inputs: number of inputs of every matrix.
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
    """The distinct types in `types`, comma-separated, or `dtype` if it is empty."""
    return ", ".join(sorted({*types.values()} or {dtype}))
