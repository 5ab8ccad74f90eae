"""Bounds of numbers that llguidance reads in another way than JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.structured.walking import Allows

ZEROS = ("0", "-0", "0.0", "-0.0")
VALUES = (*ZEROS, "0.5", "-0.5", "0.25", "-0.25", "0.001", "3", "3.0", "3.1", "-3", "-3.1")


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.001", "0.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.001", "0.25"]),
        ({"exclusiveMinimum": 3, "maximum": 3.5}, ["3.1"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.25", "-0.5"]),
        ({"exclusiveMaximum": 0.0, "exclusiveMinimum": -0.5}, ["-0.25"]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, ["-3.1"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.001", "0.5"]),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5}, ["-0.25", "0", "0.25"]),
    ],
)
def test_exclusive_bounds(allows: Allows, bounds: dict[str, float], inside: list[str]) -> None:
    schema = {"type": "number", **bounds}
    allowed = [text for text in VALUES if allows(schema, text)]
    assert set(inside) <= set(allowed)
    for text in allowed:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": -(2**63)}, "-9000000000000000001", "-9223372036854775809"),
        ({"type": "integer", "minimum": -(10**25)}, "-5", "-10000000000000000000000001"),
        ({"type": "integer", "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"type": "integer", "maximum": 10**400}, "9223372036854775807", "1" + "0" * 400 + "1"),
        ({"type": ["integer", "null"], "minimum": -1e30}, "-9000000000000000000", "-1" + "0" * 31),
        ({"type": "number", "maximum": 1e30}, "8999999999999999999.5", "1" + "0" * 31),
        ({"type": "number", "exclusiveMinimum": -1e30, "maximum": 5}, "-1.5", "-1" + "0" * 31),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1e308}, "1.5", "-1"),
    ],
)
def test_bounds_beyond_64_bits(
    allows: Allows, schema: dict[str, Any], inside: str, outside: str
) -> None:
    assert allows(schema, inside)
    assert not allows(schema, outside)
