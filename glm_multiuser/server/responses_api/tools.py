"""Tools of `/v1/responses`: functions and namespaces, and their conversion to tools of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Discriminator, Field

from glm_multiuser.server.bodies import LongList, Strict, type_tag
from glm_multiuser.server.openai.adapter import RUNS_NO_TOOL, DescribedTool, chat_tool
from glm_multiuser.server.openai.fields import Hint, Only, ValidJSON


class FunctionTool(DescribedTool):
    """A function that the model may call."""

    type: Annotated[Any, Only("function", why=RUNS_NO_TOOL)]
    name: Annotated[str, ValidJSON]
    description: Annotated[Optional[str], ValidJSON] = None
    parameters: Annotated[Optional[dict[str, Any]], ValidJSON] = Field(
        None, description="A JSON schema."
    )

    output_schema: Hint[dict[str, Any]] = None


class NamespaceTool(Strict):
    """Functions with a common namespace, such as those of an MCP server."""

    type: Literal["namespace"]
    name: Annotated[str, ValidJSON]
    description: Annotated[Optional[str], ValidJSON] = None
    tools: LongList[FunctionTool]


SHOWN = {"type", "name", "description", "parameters", "strict"}
"""Fields of a function that the response repeats."""
FUNCTION, NAMESPACE = type_tag("function"), type_tag("namespace")


def _tag_of(tool: object) -> str:
    """Also takes tools of other types for functions, whose error says what is wrong."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return NAMESPACE.tag if kind == "namespace" else FUNCTION.tag


Tool = Annotated[
    Union[Annotated[FunctionTool, FUNCTION], Annotated[NamespaceTool, NAMESPACE]],
    Discriminator(_tag_of),
]


def chat_name(name: str, namespace: Optional[str]) -> str:
    """Returns the name of a function in the chat, as vLLM writes it."""
    return name if namespace is None else f"{namespace}__{name}"


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Returns the tools of the chat, where namespaces are part of the names."""
    written: list[dict[str, object]] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            written.append(chat_tool(tool, tool.parameters))
            continue
        about = tool.description
        for function in tool.tools:
            named = {
                "name": chat_name(function.name, tool.name),
                "description": "\n\n".join(filter(None, (about, function.description))) or None,
            }
            written.append(chat_tool(function.model_copy(update=named), function.parameters))
            about = None  # Descriptions of MCP servers are long: the prompt has them once.
    return written


def called_functions(tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Maps the chat's names of functions in namespaces to the fields of a call that name them."""
    return {
        chat_name(function.name, tool.name): {"name": function.name, "namespace": tool.name}
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for function in tool.tools
    }


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Returns the tools for the response."""
    return [
        tool.model_dump(include=SHOWN)
        if isinstance(tool, FunctionTool)
        else {**tool.model_dump(exclude={"tools"}), "tools": shown_tools(tool.tools)}
        for tool in tools
    ]
