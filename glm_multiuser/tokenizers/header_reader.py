"""Answers of ChatGLM3 and GLM-4: a metadata line, then the content.

The line is blank before ordinary content and names the tool before a call. One answer may hold
several such messages with `<|assistant|>` between them: words first, then a call. See PROMPT.md
in THUDM/ChatGLM3 and `process_response` of both families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from glm_multiuser.tokenizers.answers import AnswerEnd, ToolCall
from glm_multiuser.tokenizers.matching import unfinished_match
from glm_multiuser.tokenizers.messages import read_tools

ROLE_TOKENS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|observation|>",
}
"""What begins a message of each role, in both families."""

SEPARATOR = ROLE_TOKENS["assistant"]
"""Begins the next message of one answer."""

TRAINING_TIME = ("[[训练时间]]", "2023年")
"""A placeholder of the training data, and what the originals write in its place."""


def last_message(answer: str) -> str:
    """What the originals' `process_response` returns for an answer without tools.

    That is the last message of the answer, without a blank metadata line and outer whitespace,
    and with the placeholder of the training data filled in. Where the original returns a
    dictionary, because the metadata line is not blank, that line stays part of the text.
    """
    message = answer.split(SEPARATOR)[-1]
    metadata, _, content = message.partition("\n")
    if not metadata.strip():
        message = content
    return message.strip().replace(*TRAINING_TIME)


class HeaderAnswerReader:
    """Drops blank metadata lines, and reads calls of the tools that were offered.

    A metadata line that names no offered tool is text. So is a call that cannot be read, once
    its message has ended. Messages with content are joined by a line break.

    Args:
        tools: the offered tools, in OpenAI's shape.
        read_arguments: makes the text of a JSON object of a call's content; None when the
            content is no call.

    Raises:
        InvalidParameterError: a tool of another shape.
    """

    def __init__(
        self, tools: Sequence[Any], read_arguments: Callable[[str], Optional[str]]
    ) -> None:
        self._names = frozenset(function["name"] for function in read_tools(tools))
        self._read_arguments = read_arguments
        self._calls: list[ToolCall] = []
        self._unsplit = ""
        self._wrote_before = False
        self._begin_message()

    def feed(self, delta: str) -> str:
        """Takes the next decoded text and returns the content that is now certain."""
        *ended, rest = (self._unsplit + delta).split(SEPARATOR)
        content = "".join(self._take(text) + self._end_message() for text in ended)
        held = unfinished_match(rest, SEPARATOR)
        self._unsplit = rest[len(rest) - held :]
        return content + self._take(rest[: len(rest) - held])

    def finish(self) -> AnswerEnd:
        """Returns what was held back and the calls, once no more text will come."""
        rest, self._unsplit = self._unsplit, ""
        return AnswerEnd(self._take(rest) + self._end_message(), tuple(self._calls))

    def _begin_message(self) -> None:
        self._header = ""
        self._called = ""
        self._call: list[str] = []
        self._in_content = False
        self._content_began = False

    def _take(self, text: str) -> str:
        if self._in_content:
            return self._content(text)
        if self._called:
            self._call.append(text)
            return ""
        self._header += text
        metadata, line_break, content = self._header.partition("\n")
        name = metadata.strip()
        if not line_break and (not name or any(one.startswith(name) for one in self._names)):
            return ""
        if line_break and name in self._names:
            self._called = name
            self._call.append(content)
            return ""
        self._in_content = True
        return self._content(content if line_break and not name else self._header)

    def _content(self, text: str) -> str:
        if not self._content_began:
            text = text.lstrip()
        if not text:
            return ""
        joint = "\n" if self._wrote_before and not self._content_began else ""
        self._content_began = self._wrote_before = True
        return joint + text

    def _end_message(self) -> str:
        text = ""
        if self._called:
            call = "".join(self._call)
            arguments = self._read_arguments(call)
            if arguments is None:
                text = self._content(f"{self._called}\n{call}")
            else:
                self._calls.append(ToolCall(self._called, arguments))
        elif not self._in_content:
            text = self._content(self._header)
        self._begin_message()
        return text
