"""Limits `multipleOf` in JSON schemas: llguidance has a state for each remainder."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from glm_multiuser.errors import InvalidParameterError

MULTIPLE_MAX = 10_000
"""Larger ones may take seconds and gigabytes, unless they are one digit and zeros."""
PRODUCT_MAX = 2**32
"""llguidance's least common multiples overflow from here on."""


def check_multiples(given: Iterable[Any], combined: bool) -> None:
    """Checks every `multipleOf` of a schema. Decimals count in units of their last digit.

    Those that llguidance rejects are left to it.

    Args:
        given: their values.
        combined: whether some may apply to one number, which has their least common multiple.

    Raises:
        InvalidParameterError: a multiple is too large.
    """
    numbers = [one for one in given if type(one) in (int, float) and 0 < one < PRODUCT_MAX]
    found = dict.fromkeys(map(str, numbers))
    places = {text: max(-int(Decimal(text).as_tuple().exponent), 0) for text in found}
    most, common = max(places.values(), default=0), 1
    for text in found:
        _check(int(Fraction(text) * 10 ** places[text]), text)
        if combined:
            number = int(Fraction(text) * 10**most)
            if common * number >= PRODUCT_MAX:
                raise _too_large(f"{text} beside others")
            common = math.lcm(common, number)
            _check(common, f"{text} beside others")


def _check(number: int, text: str) -> None:
    if number > MULTIPLE_MAX and len(str(number).rstrip("0")) > 1:
        raise _too_large(text)


def _too_large(text: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"grammar has multipleOf {text}; without decimal points, the least common multiple of "
        f"those that may be combined may be at most {MULTIPLE_MAX}",
        "grammar",
    )
