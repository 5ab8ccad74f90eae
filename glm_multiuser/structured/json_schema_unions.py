"""Unions in JSON schemas whose cases are told apart by a property, OpenAPI's `discriminator`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Optional, Union
from urllib.parse import unquote

Schema = dict[str, object]
"""A JSON schema that is no boolean."""

OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name."""
OF_VALUES = ("const", "enum")
"""Keywords whose value is no schema."""
OF_DEFINITIONS = ("$defs", "definitions")


class Place(NamedTuple):
    """Where a definition is."""

    group: str
    name: str


def _place(schema: object) -> Optional[Place]:
    """Returns the place of the definition that this schema refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return None
    group, _, name = reference.removeprefix("#/").partition("/")
    return Place(group, unquote(name).replace("~1", "/").replace("~0", "~"))


def target_of(schema: object, root: Schema) -> Optional[Schema]:
    """Returns the definition that the schema refers to, or the schema; None if there is none."""
    place = _place(schema)
    if place is not None:
        defined = root.get(place.group) if place.group in OF_DEFINITIONS else None
        schema = defined.get(place.name) if isinstance(defined, dict) else None
    return schema if isinstance(schema, dict) else None


def everything(schema: object) -> Iterator[Schema]:
    """Yields the schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict):
            yield one
            for keyword, value in one.items():
                named = keyword in OF_SCHEMAS and isinstance(value, dict)
                waiting.extend(value.values() if named else [] if keyword in OF_VALUES else [value])


def _tag(discriminator: object) -> Optional[str]:
    """Returns the name of the property by which OpenAPI's `discriminator` tells cases apart."""
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def with_required_tags(root: Schema) -> Schema:
    """Returns the schema with definitions that require the discriminator of unions of them.

    pydantic requires it, too, but its schemas say so only if it has no default. Without it, cases
    may overlap.
    """
    given = {group: root.get(group) for group in OF_DEFINITIONS}
    definitions = {group: dict(one) for group, one in given.items() if isinstance(one, dict)}
    for schema in everything(root):
        tag, cases = _tag(schema.get("discriminator")), schema.get("oneOf")
        for case in cases if tag is not None and isinstance(cases, list) else ():
            place = _place(case)
            if place is None:
                continue
            definition = definitions.get(place.group, {}).get(place.name)
            if isinstance(definition, dict) and tag in _properties(definition):
                definitions[place.group][place.name] = _requiring(definition, tag)
    return {**root, **definitions}


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(schema: Schema) -> list[object]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _requiring(schema: Schema, name: str) -> Schema:
    required = required_of(schema)
    return schema if name in required else {**schema, "required": [*required, name]}


def with_tagged_cases(schema: Schema, discriminator: object, root: Schema) -> Schema:
    """Returns a schema whose `oneOf` with a discriminator is `anyOf`, which llguidance also takes
    if cases are recursive or their tags are numbers. If tags may be equal, every case of `oneOf`
    requires the tag.
    """
    tag, cases = _tag(discriminator), schema.get("oneOf")
    if tag is None or not isinstance(cases, list):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    of_cases = [_tags(case, tag, root) for case in cases]
    tags = [one for values in of_cases for one in values or ()]
    if "anyOf" not in rest and all(of_cases) and len(set(tags)) == len(tags):
        return {**rest, "anyOf": cases}
    return {**rest, "oneOf": [{"allOf": [case, {"required": [tag]}]} for case in cases]}


def _tags(case: object, tag: str, root: Schema) -> Optional[list[Union[str, int]]]:
    """Returns the values of the property `tag` of a case; None if a value of it may be no object,
    lack the property, or have others than listed texts and integers."""
    schema = target_of(case, root) or {}
    if schema.get("type") != "object" or tag not in required_of(schema):
        return None
    listed = target_of(_properties(schema).get(tag), root) or {}
    values = [listed["const"]] if "const" in listed else listed.get("enum")
    if not isinstance(values, list) or not {type(value) for value in values} <= {str, int}:
        return None
    return values
