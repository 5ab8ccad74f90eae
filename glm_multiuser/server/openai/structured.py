"""Fields that constrain answers, and their conversion to a `Grammar`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

from pydantic import Field

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.server.bodies import Lenient, LongList, Strict, type_tag
from glm_multiuser.server.openai.fields import NoEffect, Only, one_of
from glm_multiuser.server.openai.messages import Tool
from glm_multiuser.structured.grammar import Grammar

SchemaOrText = Union[dict[str, Any], str]
"""A JSON schema, or its text."""


class NamedSchema(Strict):
    """A JSON schema, enforced with and without `strict`; models do not see its name."""

    name: NoEffect = None
    description: NoEffect = None
    content: dict[str, Any] = Field(alias="schema")
    strict: NoEffect = None


class ResponseFormat(Strict):
    """The format of the answer's content. `schema` of a json_object is from llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Optional[NamedSchema] = None
    content: Optional[dict[str, Any]] = Field(None, alias="schema")


class StructuredOutputs(Strict):
    """vLLM's field: one of the first five constrains the answer."""

    content: Optional[SchemaOrText] = Field(None, alias="json", description="A JSON schema.")
    regex: Optional[str] = None
    choice: Optional[LongList[str]] = None
    grammar: Optional[str] = None
    json_object: Optional[bool] = None

    disable_additional_properties: Annotated[Any, Only(False)] = None
    disable_any_whitespace: NoEffect = None
    disable_fallback: NoEffect = None
    structural_tag: Annotated[Any, Only()] = None
    whitespace_pattern: NoEffect = None

    def grammars(self) -> list[Grammar]:
        """Returns the given grammars; an empty text or list counts as null."""
        given = []
        if self.content or self.content == {}:
            given.append(Grammar.json_schema(self.content))
        if self.regex:
            given.append(Grammar.regex(self.regex))
        if self.choice:
            given.append(Grammar.choice(self.choice))
        if self.grammar:
            given.append(Grammar.lark(self.grammar))
        return [*given, Grammar.json_object()] if self.json_object else given


class ChosenFunction(Lenient):
    """The function to call."""

    name: str


class ChosenTool(Lenient):
    """The tool to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Lenient):
    """The only tools that may be called; with mode required, one must be called."""

    mode: Literal["auto", "required"]
    tools: LongList[ChosenTool]


class AllowedToolChoice(Lenient):
    """Allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


CallMode = Annotated[Literal["none", "auto", "required"], type_tag("str")]
CHOICE_TYPES = one_of('must be "none", "auto", "required", or of type function or allowed_tools')
"""Discriminator of a union of `CallMode` and objects of these types."""

ToolChoice = Annotated[
    Union[
        CallMode,
        Annotated[ChosenTool, type_tag("function")],
        Annotated[AllowedToolChoice, type_tag("allowed_tools")],
    ],
    CHOICE_TYPES,
]


def response_grammar(wanted: Optional[ResponseFormat]) -> Optional[Grammar]:
    """Returns the grammar of a `response_format`; None for any text.

    Raises:
        InvalidParameterError: a schema that is missing, unsupported, or not one of this type.
    """
    if wanted is None:
        return None
    with _field("response_format"):
        for name, owner, given in (
            ("json_schema", "json_schema", wanted.json_schema),
            ("schema", "json_object", wanted.content),
        ):
            if given is not None and wanted.type != owner:
                raise InvalidParameterError(
                    f"type is {wanted.type!r}; only type {owner!r} can have {name}"
                )
        if wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Grammar.json_schema(wanted.content) if wanted.content else Grammar.json_object()
        if wanted.json_schema is None:
            raise InvalidParameterError("type json_schema needs a schema in json_schema.schema")
        return Grammar.json_schema(wanted.json_schema.content)


class FieldGrammar(NamedTuple):
    """A grammar, and the field of the request that asks for it."""

    field: str
    grammar: Grammar


def structured_grammar(given: Mapping[str, Optional[StructuredOutputs]]) -> Optional[FieldGrammar]:
    """Returns the grammar of `structured_outputs` and vLLM's older fields.

    Args:
        given: by the names of these fields.

    Raises:
        InvalidParameterError: several grammars, or an unsupported one.
    """
    found: list[FieldGrammar] = []
    for name, outputs in given.items():
        with _field(name):
            found += [FieldGrammar(name, one) for one in (outputs.grammars() if outputs else ())]
            if len(found) > 1:
                kinds = ", ".join(one.grammar.kind for one in found)
                raise InvalidParameterError(
                    f"the request asks for {kinds}; it may have one of them"
                )
    return found[0] if found else None


def callable_tools(tools: Sequence[Tool], choice: Optional[ToolChoice]) -> list[Tool]:
    """Returns the tools that the model may call.

    Raises:
        InvalidParameterError: an allowed function is not one of the tools.
    """
    if not isinstance(choice, AllowedToolChoice):
        return [] if choice == "none" else list(tools)
    allowed = [tool.function.name for tool in choice.allowed_tools.tools]
    for name in allowed:
        _check_offered(name, [tool.function.name for tool in tools])
    return [tool for tool in tools if tool.function.name in allowed]


def call_mode(choice: Optional[ToolChoice]) -> Union[str, ChosenTool, None]:
    """Returns "auto", "none", "required", or the tool that must be called; None if not given."""
    return choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice


def tool_grammar(
    tools: Sequence[Tool], mode: Union[str, ChosenTool, None], content: Optional[Grammar]
) -> Optional[Grammar]:
    """Returns the grammar of answers that must be a call, or whose calls must fit a schema.

    Args:
        tools: that the model may call; the arguments of strict ones must fit their `parameters`.
        mode: "required" or a function: the answer is exactly one call.
        content: grammar of an answer that is not a call.

    Raises:
        InvalidParameterError: no tools, or a function that is not among them.
    """
    if mode in (None, "auto", "none"):
        if not tools or (content is None and not any(tool.function.strict for tool in tools)):
            return None
        with _field("tools"):
            offered = [
                tool.offered() if tool.function.strict else _any_arguments(tool.offered())
                for tool in tools
            ]
            schema = content.value if content else None
            return Grammar.tool_call(offered, required=False, content=schema)
    offered = [tool.offered() for tool in tools]
    if isinstance(mode, ChosenTool):
        names = [tool.function.name for tool in tools]
        _check_offered(mode.function.name, names)
        offered = [offered[names.index(mode.function.name)]]
    elif not offered:
        raise InvalidParameterError(
            "tool_choice forces a call; it needs at least 1 tool", field="tool_choice"
        )
    with _field("tools"):
        return Grammar.tool_call(offered)


def only_one(
    structured: Optional[FieldGrammar], other: Optional[Grammar], field: str
) -> Optional[Grammar]:
    """Returns the given grammar, if any.

    Args:
        structured: of `structured_grammar`.
        other: of another field.
        field: its name.

    Raises:
        InvalidParameterError: both are given.
    """
    if structured and other:
        raise InvalidParameterError(
            f"{structured.field} asks for a {structured.grammar.kind} beside {field}; "
            "give one of them",
            field=structured.field,
        )
    return structured.grammar if structured else other


def _check_offered(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise InvalidParameterError(
            f"tool_choice is the function {name[:80]!r}; it must be one of tools: "
            f"{', '.join(names) or 'there are none'}",
            field="tool_choice",
        )


def _any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


@contextmanager
def _field(name: str) -> Iterator[None]:
    """Makes errors name this field of the request."""
    try:
        yield
    except InvalidParameterError as error:
        raise InvalidParameterError(f"{name}: {error}", name) from None
