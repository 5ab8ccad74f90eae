"""JSON schemas of the kinds that clients send, made with a fixed seed."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "名字", "is it", 'a"b', "x\\y", "émile", "items", "$ref no")


def schemas(count: int, seed: int = 20) -> list[dict[str, Any]]:
    """The first ones are the same for every count. A model with random logits comes to their end:
    strings, numbers and lists have a greatest length."""
    generator = random.Random(seed)
    return [_object(generator, 3) for _ in range(count)]


def _object(generator: random.Random, depth: int) -> dict[str, Any]:
    names = generator.sample(WORDS, generator.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(generator, depth - 1) for name in names},
        "additionalProperties": False,
    }
    required = [name for name in names if generator.random() < 0.7]
    if required or generator.random() < 0.5:
        schema["required"] = required
    return schema


def _value(generator: random.Random, depth: int) -> dict[str, Any]:
    makers = [_text, _pattern, _format, _integer, _enum, _constant, _boolean]
    if depth > 0:
        makers += [_object_below, _list, _union, _tuple, _shared]
    return generator.choice(makers)(generator, depth)


def _text(generator: random.Random, depth: int) -> dict[str, Any]:
    shortest = generator.randint(0, 4)
    return {
        "type": "string",
        "minLength": shortest,
        "maxLength": shortest + generator.randint(0, 9),
    }


def _pattern(generator: random.Random, depth: int) -> dict[str, Any]:
    patterns = (r"^[a-z]{1,8}$", r"^\d{3}-\d{4}$", r"^(ja|nein)$", r"^[^\"]{2,5}$")
    pattern = generator.choice(patterns)
    return {"type": "string", "pattern": pattern}


def _format(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": generator.choice(("date", "time", "uuid", "ipv4"))}


def _integer(generator: random.Random, depth: int) -> dict[str, Any]:
    low = generator.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 10_000)}


def _enum(generator: random.Random, depth: int) -> dict[str, Any]:
    values = ("red", "grün", "蓝", 1, -2.5, True, None, "", 'q"q', ["a", 1], {"k": "v"})
    return {"enum": generator.sample(values, generator.randint(1, 4))}


def _constant(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"const": generator.choice(("fixed", 3, None, False))}


def _boolean(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"type": generator.choice(("boolean", "null"))}


def _object_below(generator: random.Random, depth: int) -> dict[str, Any]:
    return _object(generator, depth)


def _list(generator: random.Random, depth: int) -> dict[str, Any]:
    fewest = generator.randint(0, 2)
    return {
        "type": "array",
        "items": _value(generator, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + generator.randint(0, 2),
    }


def _tuple(generator: random.Random, depth: int) -> dict[str, Any]:
    items = [_value(generator, depth - 1) for _ in range(generator.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(generator, depth - 1) for _ in range(generator.randint(1, 3))]}


def _shared(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": generator.randint(0, 99)}]}
