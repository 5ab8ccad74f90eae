"""Prepares JSON schemas for llguidance."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Optional
from urllib.parse import quote

from glm_multiuser.errors import InvalidParameterError, shown
from glm_multiuser.structured.grammar import PROPERTIES_MAX
from glm_multiuser.structured.json_schema_unions import (
    OF_SCHEMAS,
    OF_VALUES,
    Schema,
    everything,
    required_of,
    target_of,
    with_required_tags,
    with_tagged_cases,
)

OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one space after a comma or colon, so that a model cannot write white space for ever."""

UNIQUE_NAMES = {} if sys.version_info < (3, 10) else {"json_allowed_escapes": 'nrbtf\\"'}
"""Texts have no \\u escapes: with one, the name of a property could be written a second time, where
others are allowed. llguidance for Python 3.9 does not know this option."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
CONTROL_OF_PATTERN = re.compile(
    r"[\x00-\x1f\x7f]|\\(?:[avc]|x(?:[01][0-9a-f]|7f)|u00(?:[01][0-9a-f]|7f)|[xu]\{0*[017]?[0-9a-f]\})",
    re.IGNORECASE,
)
"""Characters that JSON cannot write without such an escape, in a constant and in a pattern."""

FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
"""JSON Schema Validation 2020-12, section 7.3. All others are annotations that validators ignore,
such as "binary" of OpenAPI and "path" of pydantic; llguidance rejects them."""

TINY = 1e-15
"""Bound in the place of an exclusive 0, if llguidance would allow 0. Every smaller number is
excluded, too, but answers cannot begin with more zeros either."""

LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
EXACT = 2**53
"""llguidance reads every number as float64, which has other integers only up to here."""
FAR_NUMBERS = (-9 * 10**18, 9 * 10**18)
FAR_INTEGERS = (-(2**63) + 1024, 2**63)
"""llguidance computes with int64, and rejects ranges that go further, except that it reads every
greater maximum of an integer as 2**63 - 1. These are exact as float64, which it reads first."""

DIALECTS = (
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
)
"""Values of `$schema` that llguidance knows; it rejects others. Without one, it reads 2020-12."""

ANNOTATIONS = (
    *("discriminator", "deprecated", "nullable", "example", "xml", "externalDocs"),
    *("default", "examples"),
)
"""Keywords that constrain nothing: those of OpenAPI, as those that begin with x-, which llguidance
takes for constraints, and rejects beside a recursive reference; and two whose values a reference
would read as schemas."""
COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
OF_OBJECTS = {"type", "properties", "patternProperties", "additionalProperties"}
OF_NAMES = {"$ref", "const", "enum", "type", "title", "description"}
"""Keywords of a `propertyNames` that may list all names."""
WRITTEN_MAX = 262_144
"""Maximum of characters of a schema with the properties that its `propertyNames` list."""


def for_llguidance(schema: Any) -> dict[str, Any]:
    """Returns the schema, an object or a boolean, without what llguidance rejects or misreads.

    Answers that fit it fit the given schema, too.

    Raises:
        InvalidParameterError: `propertyNames` list so many names that the schema is too large,
            `minProperties` could be reached by writing a property twice, or a constant is a
            number beyond 2**53.
    """
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    for one in everything(schema):
        _check_constants([one.get("const"), one.get("enum")])
    schema = with_required_tags(schema)
    read = _without_annotations(schema, schema, _names_in_references(schema))
    length = _length(read, {})
    if length > WRITTEN_MAX:
        raise InvalidParameterError(
            f"grammar: with the properties that propertyNames list, the schema has {length} "
            f"characters; the limit is {WRITTEN_MAX}",
            "grammar",
        )
    unique = {} if _needs_escapes(schema) else UNIQUE_NAMES
    return {**read, "x-guidance": {**OPTIONS, **unique}}


def _check_constants(value: object) -> None:
    """Refuses numbers that llguidance would round, or that would end the process."""
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_constants(part)
    elif isinstance(value, (int, float)) and abs(value) > EXACT:
        raise InvalidParameterError(
            f"grammar has the number {shown(value)} in const or enum; its magnitude may be at "
            f"most {EXACT} (2**53)",
            "grammar",
        )


def _needs_escapes(schema: Schema) -> bool:
    constants: list[object] = []
    patterns: list[object] = []
    for one in everything(schema):
        constants += [one.get("const"), one.get("enum"), _names(one.get("properties"))]
        patterns += [one.get("pattern"), *_names(one.get("patternProperties"))]
    return any(CONTROL.search(text) for text in _texts(constants)) or any(
        CONTROL_OF_PATTERN.search(text) for text in patterns if isinstance(text, str)
    )


def _names(value: object) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _texts(part)


def _names_in_references(schema: Schema) -> frozenset[str]:
    """Returns the keywords on the paths to the targets of all references."""
    references = [one.get("$ref") for one in everything(schema)]
    paths = [one.split("/") for one in references if isinstance(one, str)]
    return frozenset(name for path in paths for name in path)


def _length(value: Any, known: dict[int, int]) -> int:
    """Returns about how many characters a value has as JSON. Shared parts are counted each time,
    but looked at once."""
    if not isinstance(value, (dict, list)):
        return len(str(value))
    if id(value) not in known:
        parts = list(value.values()) if isinstance(value, dict) else value
        names = sum(map(len, value)) if isinstance(value, dict) else 0
        distinct = {id(part): part for part in parts}
        counts = Counter(map(id, parts))
        lengths = (counts[one] * _length(part, known) for one, part in distinct.items())
        known[id(value)] = names + 4 * len(parts) + sum(lengths)
    return known[id(value)]


def _without_annotations(schema: Schema, root: Schema, named: frozenset[str]) -> Schema:
    """`named`: an object that looks like an annotation may hold the target of a reference."""
    kept = {
        keyword: _keyword(keyword, value, root, named)
        for keyword, value in schema.items()
        if (keyword in named and isinstance(value, dict)) or not _constrains_nothing(keyword, value)
    }
    kept = with_tagged_cases(_with_listed_names(kept, root), schema.get("discriminator"), root)
    _check_least_properties(kept)
    kept.update(_far_bounds(kept))
    return {**kept, **_exclusive_bounds(kept)}


def _with_listed_names(schema: Schema, root: Schema) -> Schema:
    """Returns a schema whose `propertyNames` lists all names with `properties` instead.

    That is how pydantic and zod write a mapping whose keys are of an enumeration. The names share
    one schema, which is written for each of them.
    """
    names = _listed(schema.get("propertyNames"), root)
    if names is None or "patternProperties" in schema:
        return schema
    known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(known, dict):
        return schema
    listed = dict.fromkeys(names, other)
    if len(listed) > PROPERTIES_MAX:
        raise InvalidParameterError(
            f"grammar has propertyNames that list {len(listed)} properties; an object may have at "
            f"most {PROPERTIES_MAX}",
            "grammar",
        )
    properties = {**listed, **{name: known[name] for name in known.keys() & listed.keys()}}
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    return {**rest, "properties": properties, "additionalProperties": False}


def _listed(names: object, root: Schema) -> Optional[list[str]]:
    """Returns the only texts that fit this schema; None if it does not list them."""
    if not isinstance(names, dict) or not names.keys() <= OF_NAMES:
        return None
    if "$ref" in names:
        target = target_of(names, root)
        # An enumeration refers to nothing else.
        return None if target is None or "$ref" in target else _listed(target, root)
    values = [names["const"]] if "const" in names else names.get("enum")
    is_list = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return values if is_list else None


def _check_least_properties(schema: Schema) -> None:
    """Refuses a `minProperties` that an answer could reach by writing a property twice.

    llguidance keeps other properties apart from those of `properties`, but not from each other. It
    combines the parts of `allOf`, which may require more.
    """
    if COMBINING & schema.keys() or not OF_OBJECTS & schema.keys():
        return
    kinds = schema.get("type", "object")
    may_be_object = "object" in (kinds if isinstance(kinds, list) else [kinds])
    least, most = schema.get("minProperties"), 1 + len(required_of(schema))
    is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    if is_open and may_be_object and _number(least) > most:
        raise InvalidParameterError(
            f"grammar: minProperties is {least}, but may be at most {most} (the required "
            "properties and one more) unless additionalProperties is false",
            "grammar",
        )


def _far_bounds(schema: Schema) -> dict[str, float]:
    """Returns bounds that llguidance rejects or rounds, moved inside to where it is exact."""
    lowest, highest = FAR_INTEGERS if schema.get("type") == "integer" else FAR_NUMBERS
    bounds = {name: _number(schema.get(name)) for name in (*LOWER, *UPPER)}
    far = {name: bound for name, bound in bounds.items() if abs(bound) > EXACT}
    lower = {name: _float_above(max(far[name], lowest)) for name in LOWER if name in far}
    upper = {name: -_float_above(-min(far[name], highest)) for name in UPPER if name in far}
    if far.get("maximum") == 2**63 - 1:  # the next float64 would be 2**63 - 1024
        upper["maximum"] = highest
    return {**lower, **upper}


def _float_above(number: float) -> float:
    """Returns the least integer that is a float64 and not less than this number."""
    if abs(number) > 2**64:
        return number  # llguidance rejects it
    near = float(number)
    return int(near if near >= number else math.nextafter(near, math.inf))


def _exclusive_bounds(schema: Schema) -> dict[str, float]:
    """Returns those that llguidance would allow as values, moved to the next number inside.

    It allows k in ranges from k to less than k + 1, such as 0 in `exclusiveMinimum: 0, maximum:
    0.5`, and -0 in the same below 0.
    """
    moved = {}
    for keyword, sign, others in (
        ("exclusiveMinimum", 1, UPPER),
        ("exclusiveMaximum", -1, LOWER),
    ):
        bound, *ends = [sign * _number(schema.get(name)) for name in (keyword, *others)]
        if 0 <= bound < 2**53 and not bound % 1 and any(end < bound + 1 for end in ends):
            moved[keyword] = sign * max(TINY, math.nextafter(bound, math.inf))
    return moved


def _number(value: object) -> float:
    """Returns NaN for others, which fails every comparison."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return value


def _constrains_nothing(keyword: str, value: object) -> bool:
    if keyword in ANNOTATIONS or keyword.startswith("x-"):
        return True
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword == "$schema":
        return not isinstance(value, str) or value.removesuffix("#") not in DIALECTS
    if keyword == "uniqueItems":
        return value is False
    # zod writes the second for every record.
    return keyword == "propertyNames" and value in (True, {"type": "string"}, {})


def _keyword(keyword: str, value: object, root: Schema, named: frozenset[str]) -> object:
    if keyword in OF_VALUES:
        return value
    if keyword in OF_SCHEMAS and isinstance(value, dict):
        return {name: _part(one, root, named) for name, one in value.items()}
    if keyword == "$ref" and isinstance(value, str):
        # Names such as "List[int]" are no URI.
        return quote(value, safe="%#/:?&=~!$'()*+,;@", errors="replace")
    return _part(value, root, named)


def _part(value: object, root: Schema, named: frozenset[str]) -> object:
    if isinstance(value, list):
        return [_part(one, root, named) for one in value]
    return _without_annotations(value, root, named) if isinstance(value, dict) else value
