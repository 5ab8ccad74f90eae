"""Unions in JSON schemas whose cases are told apart by a property, OpenAPI's `discriminator`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional
from urllib.parse import unquote

OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name."""
OF_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose value is no schema."""
OF_DEFINITIONS = ("$defs", "definitions")


def _place(schema: Any) -> Optional[tuple[str, str]]:
    """Returns the group and the name of the definition that this schema refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return None
    group, _, name = reference.removeprefix("#/").partition("/")
    return group, unquote(name).replace("~1", "/").replace("~0", "~")


def target_of(schema: Any, root: dict[str, Any]) -> Optional[dict[str, Any]]:
    """Returns the definition that the schema refers to, or the schema; None if there is none."""
    place = _place(schema)
    if place is not None:
        group, name = place
        defined = root.get(group) if group in OF_DEFINITIONS else None
        schema = defined.get(name) if isinstance(defined, dict) else None
    return schema if isinstance(schema, dict) else None


def everything(schema: Any) -> Iterator[dict[str, Any]]:
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


def _tag(discriminator: Any) -> Optional[str]:
    """Returns the name of the property by which OpenAPI's `discriminator` tells cases apart."""
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return name if isinstance(name, str) else None


def with_required_tags(root: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with definitions that require the discriminator of unions of them.

    pydantic requires it, too, but its schemas say so only if it has no default. Without it, cases
    may overlap.
    """
    definitions = {
        group: dict(root[group]) for group in OF_DEFINITIONS if isinstance(root.get(group), dict)
    }
    for schema in everything(root):
        tag, cases = _tag(schema.get("discriminator")), schema.get("oneOf")
        for case in cases if tag is not None and isinstance(cases, list) else ():
            group, name = _place(case) or ("", "")
            definition = definitions.get(group, {}).get(name)
            if isinstance(definition, dict) and tag in _properties(definition):
                definitions[group][name] = _requiring(definition, tag)
    return {**root, **definitions}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(schema: dict[str, Any]) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _requiring(schema: dict[str, Any], name: str) -> dict[str, Any]:
    required = required_of(schema)
    return schema if name in required else {**schema, "required": [*required, name]}


def with_tagged_cases(
    schema: dict[str, Any], discriminator: Any, root: dict[str, Any]
) -> dict[str, Any]:
    """Returns a schema whose `oneOf` with a discriminator is `anyOf`, which llguidance also takes
    if cases are recursive or their tags are numbers. If tags may be equal, every case of `oneOf`
    requires the tag.
    """
    tag, cases = _tag(discriminator), schema.get("oneOf")
    if tag is None or not isinstance(cases, list):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    tags = [one for case in cases for one in _tags(case, tag, root) or [None]]
    if "anyOf" not in rest and None not in tags and len(set(tags)) == len(tags):
        return {**rest, "anyOf": cases}
    return {**rest, "oneOf": [{"allOf": [case, {"required": [tag]}]} for case in cases]}


def _tags(case: Any, tag: str, root: dict[str, Any]) -> Optional[list[Any]]:
    """Returns the values of the property `tag` of a case; None if a value of it may be no object,
    lack the property, or have others than listed texts and integers."""
    schema = target_of(case, root) or {}
    if schema.get("type") != "object" or tag not in required_of(schema):
        return None
    listed = target_of(_properties(schema).get(tag), root) or {}
    values = [listed["const"]] if "const" in listed else listed.get("enum")
    simple = isinstance(values, list) and {type(value) for value in values} <= {str, int}
    return values if simple else None
