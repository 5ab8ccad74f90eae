"""Grammars of structured output: the values of `SamplingParams(grammar=...)`.

This module only does cheap checks; compiler.py compiles grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from glm_multiuser.errors import InvalidParameterError, shown
from glm_multiuser.structured.multiple_of import check_multiples
from glm_multiuser.structured.regex_size import check_regexes

KINDS = ("json_schema", "regex", "choice", "grammar", "tool_call")
GRAMMAR_LENGTH_MAX = 65_536
GRAMMAR_LEVELS_MAX = 64
CHOICES_MAX = 1024
PROPERTIES_MAX = 1000
"""Per object of a schema; compile time grows with the square of their number."""
ITEMS_MAX = 10_000
COMBINED = {"$ref", "anyOf", "oneOf", "multipleOf", "properties", "patternProperties", "items"}
"""llguidance combines the schemas of keywords that are together."""
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")

ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Grammar:
    """A constraint on an answer. Create it with `json_schema`, `json_object`, `regex` and so on.

    kind: "json_schema", "regex", "choice", "grammar" or "tool_call".
    text: of up to GRAMMAR_LENGTH_MAX characters: a JSON schema, a regular expression in the syntax
        of Rust's crate regex, a JSON list of texts, a grammar in the syntax of Lark or llama.cpp's
        GBNF, or the output of `tool_call`. JSON may have GRAMMAR_LEVELS_MAX levels.

    Raises:
        InvalidParameterError: an invalid kind or text; its field is "grammar".
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _wrong(f"has kind {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text:
            raise _wrong(f"of kind {self.kind} must be a text of at least 1 character")
        if len(self.text) > GRAMMAR_LENGTH_MAX:
            raise _wrong(
                f"of kind {self.kind} has {len(self.text)} characters; it may have at most "
                f"{GRAMMAR_LENGTH_MAX}"
            )
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _wrong(f"of kind {self.kind} has half of a surrogate pair: {error}") from None
        if self.kind == "regex" and (len(self.text) - len(self.text.rstrip("\\"))) % 2:
            # llguidance would ignore it.
            raise _wrong("of kind regex ends in a backslash that escapes nothing")
        if self.kind == "regex":
            check_regexes([self.text])
        if self.kind in ("json_schema", "choice", "tool_call"):
            self._check(self.value)

    def _check(self, value: Any) -> None:
        if self.kind != "choice":
            check_schema(value)
        if self.kind == "json_schema" and not isinstance(value, (Mapping, bool)):
            raise _wrong("of kind json_schema must be a JSON object")
        if self.kind == "choice" and not (
            isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        ):
            raise _wrong("of kind choice must be a JSON list of at least 1 text")
        if self.kind == "choice" and len(value) > CHOICES_MAX:
            raise _wrong(
                f"of kind choice has {len(value)} texts; it may have at most {CHOICES_MAX}"
            )

    @property
    def value(self) -> Any:
        """Parses the text of a JSON schema, a choice or tool calls.

        Raises:
            InvalidParameterError: not JSON, or too many levels.
        """
        # Counting brackets bounds the depth before the recursive parser runs.
        if _levels(self.text) > GRAMMAR_LEVELS_MAX:
            raise _wrong(
                f"of kind {self.kind} has {_levels(self.text)} levels of lists and objects; it may "
                f"have at most {GRAMMAR_LEVELS_MAX}"
            )
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise _wrong(f"of kind {self.kind} is not JSON: {error}") from None

    @property
    def is_content(self) -> bool:
        """Whether it describes content, which is never parsed as a call."""
        return self.kind != "tool_call"

    @property
    def is_free(self) -> bool:
        """Whether it constrains only the format of calls, without requiring one."""
        value = self.value if self.kind == "tool_call" else {"required": True}
        return not value["required"] and value["content"] is None

    @classmethod
    def json_schema(cls, schema: Union[Mapping[str, Any], bool, str]) -> Grammar:
        """JSON that matches a schema, which is given as a value or as text."""
        return cls("json_schema", schema if isinstance(schema, str) else _written(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema(ANY_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A full match of a regular expression."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise _wrong(f"of kind choice is {shown(texts)}; it must be a list of texts")
        return cls("choice", _written(list(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A text that matches a grammar in the syntax of Lark or llama.cpp's GBNF."""
        return cls("grammar", text)

    @classmethod
    def tool_call(
        cls,
        tools: Iterable[Mapping[str, Any]],
        *,
        required: bool = True,
        content: Optional[Mapping[str, Any]] = None,
    ) -> Grammar:
        """A call of one of these tools, in the format of the model's family.

        Args:
            tools: in OpenAI's format, `{"type": "function", "function": {...}}`. Arguments match
                the function's `parameters`; without them, a function takes none.
            required: whether the answer is exactly one call. Otherwise it is content, or calls.
            content: a JSON schema of content if no call is required; None: any text.
        """
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise _wrong(f"of kind tool_call has tools {shown(tools)}; it must be a list")
        functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
        if not functions or not all(
            isinstance(one, Mapping) and "name" in one for one in functions
        ):
            raise _wrong("of kind tool_call needs at least 1 function, and each needs a name")
        called = [
            {"name": one["name"], "parameters": _object_schema(one)}
            for one in functions
            if isinstance(one, Mapping)
        ]
        wanted = {"functions": called, "required": required, "content": content}
        return cls("tool_call", _written(wanted))


def _object_schema(function: Mapping[str, Any]) -> Any:
    """Returns the `parameters` of a function, which are an object, whatever else they allow."""
    parameters = function.get("parameters") or NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        return parameters
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise _wrong(
            f"of kind tool_call has function {function['name']!r} with parameters of type "
            f"{shown(kinds)}; it must be 'object'"
        )
    return {**parameters, "type": "object"}


def check_schema(value: object) -> None:
    """Limits constructs whose compile time exceeds what their length suggests.

    Raises:
        InvalidParameterError: one of them is too large.
    """
    waiting = [value]
    patterns: list[str] = []
    multiples: list[Any] = []
    combined = False
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        waiting += one.values()
        if len(one) > PROPERTIES_MAX:
            raise _wrong(
                f"has an object of {len(one)} properties; it may have at most {PROPERTIES_MAX}"
            )
        for name in COUNTS:
            count = one.get(name)
            if isinstance(count, (int, float)) and count > ITEMS_MAX:
                raise _wrong(f"has {name} {count}; it may be at most {ITEMS_MAX}")
        multiples.append(one.get("multipleOf"))
        combined = combined or "allOf" in one or len(COMBINED & one.keys()) > 1
        if isinstance(one.get("pattern"), str):
            patterns.append(one["pattern"])
        if isinstance(one.get("patternProperties"), dict):
            patterns += one["patternProperties"]
    check_regexes(patterns)
    check_multiples(multiples, combined)


def _levels(text: str) -> int:
    """Returns the deepest nesting of brackets outside strings."""
    deepest = level = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            level += 1
            deepest = max(deepest, level)
        elif character in "]}":
            level -= 1
    return deepest


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"cannot be written as JSON: {error}") from None


def _wrong(problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"grammar {problem}", "grammar")
