"""Messages of ChatGLM3 and GLM-4: a role's token, a metadata line, then the content.

The metadata line is blank for ordinary content and names the tool for a call. One answer may
contain several messages separated by `<|assistant|>`: content first, then calls. See PROMPT.md in
THUDM/ChatGLM3 and `process_response` of both families.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, Optional

from glm_multiuser.tokenizers.answers import AnswerEnd, AnswerReader
from glm_multiuser.tokenizers.base import ChatTokenizer
from glm_multiuser.tokenizers.calls import ToolCall
from glm_multiuser.tokenizers.forms import ANY_TEXT, literal, one_of, sequence, special_token
from glm_multiuser.tokenizers.messages import read_tools
from glm_multiuser.tokenizers.text import unfinished_match

ROLE_TOKENS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|observation|>",
}
"""First token of a message, by role."""

SEPARATOR = ROLE_TOKENS["assistant"]
"""Begins the next message of one answer."""

TRAINING_TIME = ("[[训练时间]]", "2023年")
"""A placeholder of the training data, and its replacement in the originals."""


class HeaderTokenizer(ChatTokenizer):
    """Base class of both families' tokenizers."""

    separator = SEPARATOR
    _strips_answers = True  # of a blank metadata line and the spaces after it
    _around_arguments = ("", "")
    """Text before and after the JSON object of a call's arguments."""

    def encode_message(self, role: str, metadata: str, content: str) -> list[int]:
        """Encodes one message like the originals' `build_single_message`.

        The role is a key of `ROLE_TOKENS`; the metadata is "" for ordinary content.
        """
        header = [self.special[ROLE_TOKENS[role]], *self.encode(f"{metadata}\n")]
        return header + self.encode(content)

    @property
    def call_token_ids(self) -> frozenset[int]:
        return frozenset() if self.separator_id is None else frozenset([self.separator_id])

    def content_header(self, *, continued: bool = False) -> str:
        if continued or not self._strips_answers:
            return ""
        # The space is not optional, because content may begin with one, too.
        return "\n " if self._vocabulary.first_pieces else "\n"

    def content_rule(self, content: str, *, continued: bool = False, raw: bool = False) -> str:
        header = "" if raw else self.content_header(continued=continued)
        if not header:
            return super().content_rule(content, continued=continued)
        return sequence(literal(header), content)

    def call_rule(self, name: str, arguments: str) -> str:
        before, after = self._around_arguments
        return sequence(
            self._space(), literal(f"{name}\n{before}"), arguments, literal(after) if after else ""
        )

    def calls_rule(self, calls: Sequence[str], content: Optional[str] = None) -> str:
        """Matches messages separated by `SEPARATOR`, content first."""
        if self.separator_id is None:
            return super().calls_rule(calls, content)
        call = one_of(calls)
        text = sequence(literal("\n"), self._space(), content or ANY_TEXT)
        next_call = sequence(special_token(self.separator_id), call)
        rules = [text, f"{call} ({next_call})*"]
        return one_of(rules if content else [*rules, f"{text} ({next_call})+"])

    def _space(self) -> str:
        return '" "?' if self._vocabulary.first_pieces else ""

    def process_response(self, text: str) -> str:
        """Post-processes an answer without tools like the originals' `process_response`.

        Returns the last message, without a blank metadata line and outer whitespace, and with the
        placeholder of the training data filled in. A metadata line that is not blank, for which
        the original returns a dictionary, stays in the text.
        """
        message = text.split(SEPARATOR)[-1]
        metadata, _, content = message.partition("\n")
        return (message if metadata.strip() else content).strip().replace(*TRAINING_TIME)


class HeaderAnswerReader(AnswerReader):
    """Drops blank metadata lines and extracts calls of the offered tools.

    A metadata line that names no offered tool is text, and so is a malformed call, once its
    message has ended. Messages with content are joined by a line break.

    Args:
        tools: the offered tools, in OpenAI's format.
        read_arguments: converts a call's content to the text of a JSON object; returns None if
            the content is not a call.
        continued: whether the prompt contains the start of the content; then the answer has no
            metadata line.
        around: text before and after the JSON object of a call's arguments, if any.

    Raises:
        InvalidParameterError: a malformed tool.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        read_arguments: Callable[[str], Optional[str]],
        *,
        continued: bool = False,
        around: tuple[str, str] = ("", ""),
    ) -> None:
        self._around = around
        self._names = frozenset(function["name"] for function in read_tools(tools))
        self._read_arguments = read_arguments
        self._calls: list[ToolCall] = []
        self._unsplit = ""
        self._wrote_before = continued
        self._begin_message()
        self._in_content = self._content_began = continued

    def feed(self, delta: str) -> str:
        *ended, rest = (self._unsplit + delta).split(SEPARATOR)
        content = "".join(self.take_text(text) + self._end_message() for text in ended)
        held = unfinished_match(rest, SEPARATOR)
        self._unsplit = rest[len(rest) - held :]
        return content + self.take_text(rest[: len(rest) - held])

    def take_separator(self, name: str) -> str:
        return self._end_message()

    @property
    def ended_calls(self) -> Sequence[ToolCall]:
        return self._calls

    @property
    def begun_call(self) -> Optional[ToolCall]:
        if not self._called:
            return None
        before, after = self._around
        written = "".join(self._call)
        return ToolCall(self._called, written[len(before) : max(0, len(written) - len(after))])

    def finish(self) -> AnswerEnd:
        rest, self._unsplit = self._unsplit, ""
        return AnswerEnd(self.take_text(rest) + self._end_message(), tuple(self._calls))

    def _begin_message(self) -> None:
        self._header = ""
        self._called = ""
        self._call: list[str] = []
        self._in_content = False
        self._content_began = False

    def take_text(self, text: str) -> str:
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
            text = text.lstrip(string.whitespace)  # as `AnswerTokens` does with bytes
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
