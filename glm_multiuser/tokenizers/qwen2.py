"""The tokenizer of Qwen2 and Qwen2.5: byte-level BPE and a chat template.

Follows `tokenization_qwen2.py` and `apply_chat_template` of transformers, with one deliberate
difference: there, `<|im_end|>` in a user's text becomes the special token of that name, so a user
can write messages of other roles. Here it is ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.answers import AnswerReader, PlainAnswerReader
from glm_multiuser.tokenizers.byte_level import ByteLevelTokenizer, ByteVocabulary
from glm_multiuser.tokenizers.calls import read_json_arguments
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.history import messages_of
from glm_multiuser.tokenizers.hugging_face_file import end_token_ids, read_hugging_face_files
from glm_multiuser.tokenizers.matching import unfinished_match
from glm_multiuser.tokenizers.messages import Message, read_messages, read_tools
from glm_multiuser.tokenizers.tagged_reader import TaggedAnswerReader
from glm_multiuser.tokenizers.text import check_text, shown

MARK_LENGTH = 12
"""Characters, each one of 65534: nobody guesses a mark."""


class Qwen2Tokenizer(ByteLevelTokenizer):
    """Text to ids and back for Qwen2.

    Args:
        vocabulary: with the special tokens that the template writes.
        template: writes a conversation as text.
        stop_token_ids: ids that end an answer.

    Attributes:
        stop_token_ids: as given.
    """

    def __init__(
        self, vocabulary: ByteVocabulary, template: ChatTemplate, stop_token_ids: tuple[int, ...]
    ) -> None:
        super().__init__(vocabulary)
        self.stop_token_ids = stop_token_ids
        self._template = template
        # The longest name comes first, as the library tokenizers matches them.
        names = sorted(self.special, key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or "(?!)"
        self._split = re.compile(f"({any_name})").split
        self._silent = [name for name in names if self.special[name] not in vocabulary.pieces]

    @classmethod
    def from_folder(
        cls, folder: Union[str, Path], vocabulary: Optional[ByteVocabulary] = None
    ) -> Qwen2Tokenizer:
        """Loads `tokenizer.json` (or `vocab.json` and `merges.txt`) and the chat template.

        Args:
            folder: a checkpoint folder.
            vocabulary: of that folder, when it has been read already.

        Raises:
            CheckpointError: a file that is missing or broken.
        """
        folder = Path(folder)
        vocabulary = vocabulary or read_hugging_face_files(folder)
        stops = end_token_ids(folder, vocabulary.special)
        return cls(vocabulary, ChatTemplate.from_folder(folder), stops)

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of a question with its history, as the chat template writes them.

        Args:
            query: the question to be answered.
            history: what `rounds_of` reads.

        Raises:
            InvalidParameterError: a query that is not a string, or a history that is none.
        """
        return self.encode_messages(messages_of(query, history))

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation, as the chat template writes it.

        The template sees every text with an unguessable mark inside whatever reads like a
        special token, and the mark is taken out after the special tokens that the template
        itself wrote have been found. So ordinary texts get the ids of the original, and no
        text ends a message. In an assistant's message, tokens that answers show (`<think>`,
        `<tool_call>`) keep their ids: they are the model's own words.

        Args:
            messages: what `read_messages` reads.
            tools: in OpenAI's shape.

        Raises:
            InvalidParameterError: another order, role or shape, a conversation that the
                template refuses, or tools that it does not mention.
        """
        self._check_tools(tools)
        mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(MARK_LENGTH))
        told = read_messages(messages, with_tools=self._template.takes_tools)
        all_names = list(self.special)
        written = [
            _for_template(one, self._silent if one.role == "assistant" else all_names, mark)
            for one in told
        ]
        rendered = self._template.render(written, _marked(list(tools), all_names, mark))
        ids: list[int] = []
        for place, part in enumerate(self._split(rendered)):
            if place % 2:
                ids.append(self.special[part])
            elif part:
                ids += self.encode(part.replace(mark, ""))
        return ids

    def answer_reader(self, tools: Sequence[Mapping[str, Any]] = ()) -> AnswerReader:
        """A reader for one answer to a conversation with these tools.

        Raises:
            InvalidParameterError: tools of another shape, or that the template does not mention.
        """
        self._check_tools(tools)
        return TaggedAnswerReader(tools) if tools else PlainAnswerReader()

    @staticmethod
    def process_response(text: str) -> str:
        """The answer as it is: the original leaves it alone."""
        return text

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and not self._template.takes_tools:
            raise InvalidParameterError(
                f"tools is {shown(tools)}; the chat template of this checkpoint does not mention "
                "tools, so it must be empty"
            )
        read_tools(tools)


def _for_template(message: Message, names: Collection[str], mark: str) -> dict[str, Any]:
    """A message as templates expect it: the arguments of a call are no text but an object."""
    calls = [
        {"name": call.name, "arguments": read_json_arguments(call.arguments)}
        for call in message.calls
    ]
    content = _marked(message.content, names, mark)
    if not calls:
        return {"role": message.role, "content": content}
    functions = [{"type": "function", "function": _marked(call, names, mark)} for call in calls]
    return {"role": message.role, "content": content, "tool_calls": functions}


def _marked(value: Any, names: Collection[str], mark: str) -> Any:
    """Puts the mark into every special token's name in a JSON value's texts.

    A name that only begins at the end of a text gets it too, because the template may write
    another text behind it.
    """
    if isinstance(value, Mapping):
        return {
            _marked(name, names, mark): _marked(one, names, mark) for name, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_marked(one, names, mark) for one in value]
    if not isinstance(value, str):
        return value
    check_text(value, "text")
    for name in names:
        value = value.replace(name, name[0] + mark + name[1:])
    stripped = value.rstrip()
    begun = max((unfinished_match(stripped, name) for name in names), default=0)
    if begun:
        place = len(stripped) - begun + 1
        value = value[:place] + mark + value[place:]
    return value
