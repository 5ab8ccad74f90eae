"""From the text that a model writes to what its caller sees: content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ToolCall:
    """A model's wish that its caller runs a tool.

    Attributes:
        name: of the tool.
        arguments: the text of a JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerEnd:
    """What an answer's end brings.

    Attributes:
        text: the rest of the content.
        tool_calls: all calls of the answer, in the order in which they were written.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerReader(Protocol):
    """Reads one answer while it arrives; the result does not depend on how it is split."""

    def feed(self, delta: str) -> str:
        """Takes the next decoded text and returns the content that is now certain, often ""."""
        ...

    def finish(self) -> AnswerEnd:
        """Returns what was held back and the calls, once no more text will come."""
        ...


class PlainAnswerReader:
    """For families whose answers are nothing but content."""

    def feed(self, delta: str) -> str:
        return delta

    def finish(self) -> AnswerEnd:
        return AnswerEnd("")
