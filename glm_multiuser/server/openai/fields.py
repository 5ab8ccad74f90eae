"""Field types with custom validation or descriptions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Callable, Optional, TypeVar, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from glm_multiuser.sampling_params import (
    LOGIT_BIASES_MAX,
    STOP_LENGTH_MAX,
    STOP_MAX,
    biases_by_id,
)
from glm_multiuser.server.bodies import ONE_OF, few_fields, type_tag
from glm_multiuser.server.settings import Limits

CHOICES_MAX = Limits.choices
"""For the OpenAPI description; requests are checked against the limit of the running server."""


class MinusOne:
    """Also accepts -1, like vLLM and llama.cpp.

    Args:
        meaning: the value that -1 stands for.
        described: its text in the OpenAPI description.
    """

    def __init__(self, meaning: Optional[int], described: str) -> None:
        self.meaning = meaning
        self.described = described

    def read(self, value: Any) -> Any:
        return self.meaning if type(value) is int and value == -1 else value

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        written["anyOf"] = [*written["anyOf"], {"const": -1, "description": self.described}]
        return written


class Only:
    """An unimplemented field, accepted only at values without effect.

    Args:
        neutral: these values, as in JSON; null is always one of them.
        why: the error message for other values.
    """

    def __init__(self, *neutral: Any, why: str = "is not implemented here") -> None:
        self.neutral = (*neutral, None)
        self.why = why

    def check(self, value: Any) -> Any:
        """Rejects every other value."""
        for one in self.neutral:
            # False == 0 and True == 1 in Python, but not in JSON.
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return value
        raise PydanticCustomError(
            "not_implemented",
            "{why}; it can only be {values}",
            {"why": self.why, "values": " or ".join(map(json.dumps, self.neutral))},
        )

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.neutral), "description": f"Anything else {self.why}."}


def one_of(wanted: str, default: Optional[str] = None) -> Discriminator:
    """Discriminates a union of objects, each `Annotated` with the `type_tag` of its type.

    The type of any other value is the name of its Python type, such as "str".

    Args:
        wanted: the error message for other types.
        default: the type of objects without one.
    """

    def tag_of(value: object) -> Optional[str]:
        if isinstance(value, dict):
            kind = value.get("type", default)
        else:
            kind = getattr(value, "type", type(value).__name__)
        return type_tag(kind).tag if isinstance(kind, str) else None

    return Discriminator(tag_of, custom_error_type=ONE_OF, custom_error_message=wanted)


class OrText:
    """A list of parts, given as such or as a text.

    Args:
        part: converts a text to the only part.
    """

    def __init__(self, part: Callable[[str], dict[str, Any]]) -> None:
        self.part = part

    def read(self, value: Any) -> Any:
        return [self.part(value)] if isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


Value = TypeVar("Value")
Hint = Annotated[Optional[Value], Field(description="Accepted, without effect.")]
"""A field without effect on answers; values of the wrong type are rejected."""
NoEffect = Hint[Any]
"""The same, of any type."""


def _check_json(value: Value) -> Value:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise PydanticCustomError(
            "json", "must be valid JSON: without NaN, infinite numbers and lone surrogates"
        ) from None
    return value


ValidJSON = AfterValidator(_check_json)
"""For fields that a response echoes: Python parses more than JSON in UTF-8 can represent."""


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH_MAX)]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": STOP_LENGTH_MAX}

Stop = Annotated[
    list[StopText],
    Field(max_length=STOP_MAX),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_TEXT,
                {"type": "array", "items": _STOP_TEXT, "maxItems": STOP_MAX},
                {"type": "null"},
            ],
            "description": "Texts before which the answer ends.",
        }
    ),
]


def _biases(value: Any) -> Any:
    """Returns {token id: bias}; JSON keys are strings, and llama.cpp's clients send [] for none."""
    if not isinstance(value, dict):
        return None if value == [] else value
    return biases_by_id(value)


LogitBias = Annotated[
    Optional[dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]]],
    Field(max_length=LOGIT_BIASES_MAX),
    BeforeValidator(_biases),
    few_fields(LOGIT_BIASES_MAX),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "maxProperties": LOGIT_BIASES_MAX,
                },
                {"type": "null"},
            ],
            "description": "Added to the logits of these tokens.",
        }
    ),
]


def _joined(value: Any) -> Any:
    """Returns the text of a message's content, if any."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    texts = [part.get("text") if _is_text_part(part) else None for part in value]
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise PydanticCustomError(
                "content",
                "part {place} must have the type 'text' and a text; this server reads nothing else",
                {"place": place},
            )
    return "".join(map(str, texts))


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

OptionalContent = Annotated[
    Optional[str],
    BeforeValidator(_joined),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": _TEXT_PART},
                {"type": "null"},
            ]
        }
    ),
]
"""Text, or text parts, which are joined."""

Prompt = Union[str, list[int]]


def _as_prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str) or _are_token_ids(value):
        return [value]
    several = value if isinstance(value, list) else []
    if several and (
        all(isinstance(one, str) for one in several) or all(map(_are_token_ids, several))
    ):
        return several
    raise PydanticCustomError(
        "prompt",
        "must be a text, a list of texts, a list of token ids, or a list of such lists; "
        "none may be an empty list",
    )


def _are_token_ids(value: Any) -> bool:
    # bool is a subclass of int, so the exact type is compared.
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    list[Prompt],
    PlainValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _TOKEN_IDS,
                *(
                    {"type": "array", "items": one, "minItems": 1, "maxItems": CHOICES_MAX}
                    for one in ({"type": "string"}, _TOKEN_IDS)
                ),
            ],
            "description": "A question or token ids, or several of them.",
        }
    ),
]
