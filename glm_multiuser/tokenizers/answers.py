"""Answers as content and tool calls, and reading them while they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from glm_multiuser.tokenizers.calls import ToolCall, read_json_arguments, write_json
from glm_multiuser.tokenizers.messages import read_tools
from glm_multiuser.tokenizers.text import unfinished_match

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
BEGUN = re.compile(r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)', re.DOTALL)
AFTER = "}\n"
"""What is before and after the arguments of a call in exactly the requested format."""
_STRING = r'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*'
INSIDE_STRING = re.compile(rf'[^"]*(?:{_STRING}"[^"]*)*{_STRING}', re.DOTALL)
"""JSON that ends inside a string."""


@dataclass(frozen=True)
class AnswerEnd:
    """The rest of an answer's content, and all its calls in the order they were written in."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerReader:
    """Reads one answer while it arrives; the result does not depend on how it is split.

    This one is for families whose answers are nothing but content.
    """

    def feed(self, delta: str) -> str:
        """Takes the next decoded text and returns the content that is now certain, often "".

        A special token's name in it counts as the token, as `decode` writes it.
        """
        return delta

    def take_text(self, text: str) -> str:
        """`feed` for text in which names of special tokens are spelled out, and are no tokens."""
        return self.feed(text)

    def take_separator(self, name: str) -> str:
        """`feed` for the tokenizer's `separator`, which has this name."""
        return self.feed(name)

    def finish(self) -> AnswerEnd:
        """Returns what was held back and the calls, once no more text will come."""
        return AnswerEnd("")

    @property
    def ended_calls(self) -> Sequence[ToolCall]:
        """Calls that have been read to their end."""
        return ()

    @property
    def begun_call(self) -> Optional[ToolCall]:
        """The call that is being written, with its arguments so far; None: no name is known.

        For answers whose grammar says that it is one.
        """
        return None


class ContentReader(AnswerReader):
    """Reads an answer whose grammar is that of its content, which may look like a call.

    Args:
        header: what the answer has before its content.
    """

    def __init__(self, header: str) -> None:
        self._header = header

    def feed(self, delta: str) -> str:
        content, self._header = delta[len(self._header) :], self._header[len(delta) :]
        return content


class TaggedAnswerReader(AnswerReader):
    """Extracts calls of the offered tools from a Qwen2.5 answer.

    A call is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, as Qwen2.5's chat
    template requests.

    A malformed or unfinished call, or one of another tool, is text. Whitespace before a call, and
    at the end of an answer with calls, is dropped. `</tool_call>` in a JSON string does not end a
    call.

    Args:
        tools: the offered tools, in OpenAI's format; at least one.

    Raises:
        InvalidParameterError: a malformed tool.
    """

    def __init__(self, tools: Sequence[Any]) -> None:
        self._names = frozenset(function["name"] for function in read_tools(tools))
        self._calls: list[ToolCall] = []
        self._known = ""
        self._call: list[str] = []
        self._in_call = False
        self._space = ""

    def feed(self, delta: str) -> str:
        self._known += delta
        content = ""
        while True:
            tag = CLOSING if self._in_call else OPENING
            before, found, after = self._known.partition(tag)
            if not found:
                held = unfinished_match(self._known, tag)
                before, self._known = before[: len(before) - held], before[len(before) - held :]
                return content + self._take(before)
            content += self._take(before)
            self._known = after
            if not self._in_call:
                self._in_call = True
            elif INSIDE_STRING.fullmatch("".join(self._call)):
                self._call.append(CLOSING)
            else:
                content += self._end_call()

    @property
    def ended_calls(self) -> Sequence[ToolCall]:
        return self._calls

    @property
    def begun_call(self) -> Optional[ToolCall]:
        begun = BEGUN.match("".join(self._call)) if self._in_call else None
        if begun is None:
            return None
        name = (read_json_arguments(f'{{"name": {begun.group(1)}}}') or {}).get("name")
        if not isinstance(name, str) or name not in self._names:
            return None
        # The brace after the arguments closes the call's object.
        written = begun.group(2)
        return ToolCall(name, written[: len(written) - len(AFTER)])

    def finish(self) -> AnswerEnd:
        content = ""
        while self._in_call and CLOSING in self._call:
            content += self._as_text("".join(self._call)) + self.feed("")
        if self._in_call:
            rest = self._space + OPENING + "".join(self._call) + self._known
        else:
            rest = self._take(self._known) + ("" if self._calls else self._space)
        self._known = self._space = ""
        return AnswerEnd(content + rest, tuple(self._calls))

    def _take(self, text: str) -> str:
        if self._in_call:
            self._call.append(text)
            return ""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return content

    def _end_call(self) -> str:
        written = "".join(self._call)
        call = self._read(written)
        if call is None:
            return self._as_text(written + CLOSING)
        self._calls.append(call)
        self._leave_call()
        return ""

    def _as_text(self, written: str) -> str:
        """Returns a failed call as text up to the first tag, and re-reads the rest."""
        text, tag, rest = written.partition(CLOSING)
        self._known = rest + self._known
        return self._leave_call() + OPENING + text + tag

    def _leave_call(self) -> str:
        """Ends the call and returns the whitespace before it."""
        space, self._space = self._space, ""
        self._call = []
        self._in_call = False
        return space

    def _read(self, written: str) -> Optional[ToolCall]:
        values = read_json_arguments(written) or {}
        name, arguments = values.get("name"), values.get("arguments")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        try:
            text = write_json(arguments)
            begun = BEGUN.match(written)
            if begun and read_json_arguments(begun.group(2)[: -len(AFTER)]) == arguments:
                text = begun.group(2)[: -len(AFTER)]
            return ToolCall(name, text)
        except ValueError:
            return None
