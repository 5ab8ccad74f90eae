"""Input items, and their conversion to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union

from glm_multiuser.server.bodies import Lenient, LongList, type_tag
from glm_multiuser.server.openai.chat import chat_call
from glm_multiuser.server.openai.fields import Hint, OrText, one_of
from glm_multiuser.server.responses_api.tools import chat_name


class TextPart(Lenient):
    """Text of the client or of an answer."""

    type: Literal["input_text", "output_text"]
    text: str


Texts = Annotated[LongList[TextPart], OrText(lambda text: {"type": "input_text", "text": text})]


class MessageItem(Lenient):
    """A message; its type is optional."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class CallItem(Lenient):
    """A call in an answer; `arguments` is the text of a JSON object, unless it was cut off."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: Optional[str] = None
    arguments: str


class CallOutputItem(Lenient):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(Lenient):
    """Reasoning of another model; ignored."""

    type: Literal["reasoning"]
    summary: Hint[LongList[dict[str, Any]]] = None
    content: Hint[LongList[dict[str, Any]]] = None
    encrypted_content: Hint[str] = None


InputItem = Annotated[
    Union[
        Annotated[MessageItem, type_tag("message")],
        Annotated[CallItem, type_tag("function_call")],
        Annotated[CallOutputItem, type_tag("function_call_output")],
        Annotated[ReasoningItem, type_tag("reasoning")],
    ],
    one_of(
        "this server reads no other items, and no references to items, which clients send whole "
        "if store is false; it must be of type message, function_call, function_call_output or "
        "reasoning",
        default="message",
    ),
]


def chat_messages(items: Sequence[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages of a chat, and the location of each in the input.

    Calls are added to the preceding assistant message, and text between calls and their results to
    the message with the calls.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for number, item in enumerate(items):
        if isinstance(item, MessageItem):
            text = _text(item.content)
            if item.role == "assistant" and messages and messages[-1].get("tool_calls"):
                messages[-1]["content"] += text
            else:
                messages.append({"role": item.role, "content": text})
        elif isinstance(item, CallOutputItem):
            content = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            name = chat_name(item.name, item.namespace)
            call = chat_call(item.call_id, name, item.arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
        places += [f"input[{number}]"] * (len(messages) - len(places))
    return messages, places


def _text(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)
