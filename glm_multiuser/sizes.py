"""Parses human-readable sizes in bytes."""

from __future__ import annotations

import re
from typing import Callable, Union

from glm_multiuser.errors import ConfigError

UNITS = {
    "": 1,
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}
"""Case-insensitive when parsed."""
MOST_BYTES = 2**60


def bytes_of(field: str, size: Union[str, int]) -> int:
    """Parses a size such as "32GiB", "900 MB", "1024" or 1024.

    Raises:
        ConfigError: an invalid size, or one out of range.
    """
    text = str(size) if isinstance(size, int) and not isinstance(size, bool) else size
    match = isinstance(text, str) and re.fullmatch(
        r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text
    )
    bytes_in = {unit.upper(): count for unit, count in UNITS.items()}
    if not match or match[2].upper() not in bytes_in:
        raise ConfigError(
            f"{field} is {size!r}; it must be a number of bytes, or a number with one of "
            f"{', '.join(filter(None, UNITS))}"
        )
    count = int(float(match[1]) * bytes_in[match[2].upper()])
    if not 1 <= count <= MOST_BYTES:
        raise ConfigError(f"{field} is {size!r}; it must be from 1 byte to {MOST_BYTES} bytes")
    return count


def most_within(limit: int, size: Callable[[int], int], most: int) -> int:
    """Returns the largest count, up to `most`, whose size is within `limit`, by bisection."""
    fit, too_many = 0, most + 1
    while too_many - fit > 1:
        count = (fit + too_many) // 2
        if size(count) <= limit:
            fit = count
        else:
            too_many = count
    return fit
