"""Tokenizers from `tokenizer.json` and a chat template: Llama, Mistral, Qwen, SmolLM2.

Follows `apply_chat_template` of transformers, with one deliberate difference: there, `<|im_end|>`
in a user's text becomes the special token of that name, so a user can write messages of other
roles. Here it is ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import InvalidParameterError, shown
from glm_multiuser.tokenizers.answers import CLOSING, OPENING, AnswerReader, TaggedAnswerReader
from glm_multiuser.tokenizers.base import ChatTokenizer, Vocabulary
from glm_multiuser.tokenizers.calls import read_json_arguments, write_json
from glm_multiuser.tokenizers.chat_template import CHAT_ML, ChatTemplate
from glm_multiuser.tokenizers.folder import end_token_ids
from glm_multiuser.tokenizers.forms import (
    ANY_TEXT,
    literal,
    one_of,
    sequence,
    special_token,
    text_up_to,
    text_without,
)
from glm_multiuser.tokenizers.messages import Message, read_messages, read_tools
from glm_multiuser.tokenizers.text import Objects, check_text, unfinished_match
from glm_multiuser.tokenizers.tokenizer_json import read_hugging_face_files

MARK_LENGTH = 12
"""Characters, each one of 65534, so that a mark cannot be guessed."""

CALL_TAGS = (OPENING, CLOSING)

WHITESPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
)
"""Characters with Unicode's property White_Space; `str.strip` strips four more."""


class HuggingFaceTokenizer(ChatTokenizer):
    """Tokenizer of any model that a chat template and special tokens describe.

    The template renders a conversation as text; None for base models.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: Optional[ChatTemplate],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        if template is None and "<|im_start|>" in vocabulary.special:
            template = ChatTemplate(CHAT_ML)
        self._template = template
        if self._takes_tools:
            # Calls are found by their tags, also where a file marks these as hidden.
            special = vocabulary.special
            tags = {special[tag]: tag.encode() for tag in CALL_TAGS if tag in special}
            vocabulary = replace(vocabulary, pieces={**vocabulary.pieces, **tags})
        super().__init__(vocabulary)
        self.stop_token_ids = stop_token_ids
        # The library tokenizers prefers the longest name, too.
        names = sorted(self.special, key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or "(?!)"
        self._split = re.compile(f"({any_name})").split
        self._hidden = [name for name in names if self.special[name] not in vocabulary.pieces]

    @classmethod
    def from_folder(cls, folder: Union[str, Path]) -> HuggingFaceTokenizer:
        """Loads the vocabulary and the chat template.

        Raises:
            CheckpointError: a missing or broken file.
        """
        folder = Path(folder)
        vocabulary = read_hugging_face_files(folder)
        stops = end_token_ids(folder, vocabulary.special)
        return cls(vocabulary, ChatTemplate.from_folder(folder), stops)

    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Encodes a conversation with the chat template.

        Before rendering, an unguessable mark is inserted into every special token's name in the
        texts, or takes the place of a name of one character; this is undone after the special
        tokens of the template itself are found. So ordinary texts get the ids of the original,
        and no text can end a message. In an assistant message, tokens that answers show
        (`<think>`, `<tool_call>`) keep their ids, because the model generated them.

        Raises:
            InvalidParameterError: also a conversation that the template rejects, tools that it
                does not mention, or a missing template.
        """
        self._check_tools(tools)
        conversation = read_messages(messages, continue_final_message, with_tools=self._takes_tools)
        if self._template is None:
            raise InvalidParameterError(
                "messages cannot be written: this checkpoint has no chat template, as base models "
                "have none; the prompt must be token ids, such as encode(text) returns",
                field="messages",
            )
        names, end = list(self.special), _mark()
        marks = {"": _mark(), **{name: _mark() for name in names if len(name) == 1}}
        if continue_final_message:
            last = conversation[-1]
            conversation[-1] = replace(last, content=f"{last.content}{end} ")
        written: list[dict[str, Any]] = []
        for message in conversation:
            marked = self._hidden if message.role == "assistant" else names
            written += self._template_messages(message, partial(_escape, names=marked, marks=marks))
        escaped = _escape(list(tools), names, marks)
        rendered = self._template.render(written, escaped, not continue_final_message)
        if continue_final_message:
            rendered = _up_to(end, rendered)
        return self._encode_rendered(rendered, marks)

    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        self._check_tools(tools)
        return TaggedAnswerReader(tools) if tools else AnswerReader()

    @property
    def call_token_ids(self) -> frozenset[int]:
        return frozenset(self.special[tag] for tag in CALL_TAGS if tag in self.special)

    def call_rule(self, name: str, arguments: str) -> str:
        if not self._takes_tools:
            return super().call_rule(name, arguments)
        before, after = f'\n{{"name": {write_json(name)}, "arguments": ', "}\n"
        return sequence(
            self._tag(OPENING), literal(before), arguments, literal(after), self._tag(CLOSING)
        )

    def calls_rule(self, calls: Sequence[str], content: Optional[str] = None) -> str:
        call = one_of(calls)
        more = f"({literal(chr(10))}? {call})*"
        calls_only = sequence(call, more)
        if content is not None:
            return one_of([self.content_rule(content), calls_only])
        if OPENING in self.special:
            return one_of([ANY_TEXT, sequence(ANY_TEXT, calls_only), calls_only])
        # A terminal takes as much text as it can, also the beginning of a tag after it.
        rest = one_of([one.removeprefix(literal(OPENING)) for one in calls])
        return (
            f"{one_of(['TEXT', sequence('text_and_tag', rest, more)])}\n"
            f"TEXT: {text_without(OPENING)}\n"
            f"text_and_tag[lazy]: {text_up_to(OPENING)}"
        )

    def _tag(self, tag: str) -> str:
        return special_token(self.special[tag]) if tag in self.special else literal(tag)

    @property
    def _takes_tools(self) -> bool:
        """Whether the template mentions tools, and calls in the format that answers are read in."""
        template = self._template
        return (
            template is not None and template.takes_tools and OPENING in template.for_tools.source
        )

    def _check_tools(self, tools: Objects) -> None:
        if tools and not self._takes_tools:
            raise InvalidParameterError(
                f"tools is {shown(tools)}; the chat template of this checkpoint does not "
                f"mention tools and {OPENING}, so it must be empty",
                field="tools",
            )
        read_tools(tools)

    def _template_messages(
        self, message: Message, escape: Callable[[Any], Any]
    ) -> list[dict[str, Any]]:
        """Converts a message for templates, which expect call arguments as an object, not text."""
        written = {"role": message.role, "content": escape(message.content)}
        for call in message.calls:
            function = {"name": call.name, "arguments": read_json_arguments(call.arguments)}
            calls = written.setdefault("tool_calls", [])
            calls.append({"type": "function", "function": escape(function)})
        return [written]

    def _encode_rendered(self, rendered: str, marks: Mapping[str, str]) -> list[int]:
        first = self._vocabulary.encode
        later = self._vocabulary.encode_after_special or first
        parts = self._split(rendered)
        for text, mark in marks.items():
            parts = [part.replace(mark, text) for part in parts]
        for place in range(1, len(parts), 2):
            before, after = self._vocabulary.strips.get(parts[place], (False, False))
            if before:
                parts[place - 1] = parts[place - 1].rstrip(WHITESPACE)
            if after:
                parts[place + 1] = parts[place + 1].lstrip(WHITESPACE)
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self.special[part])
            elif part:
                ids += (later if place else first)(part)
        begin = self._vocabulary.begin_id
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


def _mark() -> str:
    return "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(MARK_LENGTH))


def _up_to(end: str, rendered: str) -> str:
    """Truncates a rendered conversation after its last message's content.

    Like transformers: a template that removed the space after `end` trims contents, so the spaces
    before it are trimmed, too.

    Raises:
        InvalidParameterError: the template does not render that content.
    """
    before, _, after = rendered.rpartition(end)
    if end not in rendered:
        raise InvalidParameterError(
            "messages cannot be continued: this checkpoint's chat template does not write the "
            "content of the last one",
            field="messages",
        )
    return before if after.startswith(" ") else before.rstrip()


def _escape(value: Any, names: Collection[str], marks: Mapping[str, str]) -> Any:
    """Inserts `marks[""]` into every special token's name in a JSON value's strings.

    A name of one character is replaced by its own mark. The start of a name at the end of a
    string, and the end of one at its start, get the mark, too: the template may write the rest.
    """
    escape = partial(_escape, names=names, marks=marks)
    if isinstance(value, Mapping):
        return {escape(name): escape(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape(one) for one in value]
    if not isinstance(value, str):
        return value
    check_text(value, "text", "messages")
    mark = marks[""]
    for name in names:
        value = value.replace(name, marks.get(name, name))
        while name in value:  # again where names overlap
            value = value.replace(name, name[0] + mark + name[1:])
    value = _mark_begun(value, names, mark)
    return _mark_begun(value[::-1], [name[::-1] for name in names], mark[::-1])[::-1]


def _mark_begun(text: str, names: Collection[str], mark: str) -> str:
    """Inserts the mark into every start of a name at the end of a text, before whitespace."""
    end = text.rstrip()
    space = text[len(end) :]
    for name in names:
        while begun := unfinished_match(end, name):
            place = len(end) - begun + 1
            end = end[:place] + mark + end[place:]
    return end + space
