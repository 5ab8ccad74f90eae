"""The tokenizers of ChatGLM2 and ChatGLM3: one sentencepiece file, two forms of a prompt.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm2-6b and
THUDM/chatglm3-6b, whose `tokenizer.model` is the same file. Special tokens are not in that file:
their ids follow its pieces, so no text becomes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.tokenizers.answers import AnswerReader, PlainAnswerReader
from glm_multiuser.tokenizers.calls import (
    read_json_arguments,
    read_python_call,
    write_python_call,
)
from glm_multiuser.tokenizers.folder import read_optional, read_tokenizer_config, refuse_settings
from glm_multiuser.tokenizers.header_reader import (
    ROLE_TOKENS,
    SEPARATOR,
    TRAINING_TIME,
    HeaderAnswerReader,
    last_message,
)
from glm_multiuser.tokenizers.history import messages_of
from glm_multiuser.tokenizers.messages import (
    Message,
    questions_and_answers,
    read_messages,
    read_tools,
    refuse_tools,
)
from glm_multiuser.tokenizers.sentencepiece_file import SentencePieceFile
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE, IncrementalDetokenizer
from glm_multiuser.tokenizers.text import check_text

VOCABULARY_FILE = "tokenizer.model"

SPECIAL_TOKENS = {
    2: ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    3: (
        *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
}
"""Of each version, in the order of their ids; the first one follows the last piece of the file."""

TOOLS_INSTRUCTION = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
"""What ChatGLM3's system message says before the tools; wording of THUDM/ChatGLM3."""

UNSUPPORTED_SETTINGS = {"remove_space": False, "do_lower_case": False}
"""Settings that would change every id, with the only value that the released files use."""


class ChatGLM3Tokenizer:
    """Text to ids and back for ChatGLM3, and with `version=2` for ChatGLM2.

    The object is never changed after its construction: any number of threads may use it.

    Args:
        file: a sentencepiece model file, named `tokenizer.model` in the released checkpoints.
        version: 2 or 3.

    Attributes:
        vocab_size: pieces of the file and special tokens; a model's vocabulary is padded.
        special: id of each special token.
        special_ids: ids that no text becomes.
        stop_token_ids: `</s>`, and for ChatGLM3 `<|user|>` and `<|observation|>`.

    Raises:
        CheckpointError: a file that is missing or broken, or the one of ChatGLM-6B.
        ConfigError: another version.
    """

    def __init__(self, file: Union[str, Path], *, version: int = 3) -> None:
        if version not in SPECIAL_TOKENS:
            raise ConfigError(f"version is {version!r}; it must be 2 or 3")
        self.version = version
        self._family = f"ChatGLM{version}"
        self._pieces = SentencePieceFile(file)
        if self._pieces.find("[gMASK]") is not None:
            raise CheckpointError(
                f"{file} has a piece '[gMASK]', as the file ice_text.model of ChatGLM-6B has; "
                f"{self._family} needs a file without special tokens"
            )
        self._pieces.refuse_as_text("</s>")
        names = SPECIAL_TOKENS[version]
        self.special = {name: self._pieces.size + place for place, name in enumerate(names)}
        self._names = {token_id: name.encode("utf-8") for name, token_id in self.special.items()}
        self.vocab_size = self._pieces.size + len(names)
        self.special_ids = self._pieces.special_ids.union(self.special.values())
        ends = [] if version == 2 else [self.special["<|user|>"], self.special["<|observation|>"]]
        self.stop_token_ids: tuple[int, ...] = (self._pieces.eos_id, *ends)

    @classmethod
    def from_folder(
        cls, folder: Union[str, Path], *, version: Optional[int] = None
    ) -> ChatGLM3Tokenizer:
        """Loads `tokenizer.model` with the settings of `tokenizer_config.json`, if there is one.

        Args:
            folder: a checkpoint folder.
            version: 2 or 3; None: what `version_of` says.

        Raises:
            CheckpointError: as the class does, or a setting that this version cannot follow.
        """
        folder = Path(folder)
        refuse_settings(folder, read_tokenizer_config(folder), UNSUPPORTED_SETTINGS)
        return cls(folder / VOCABULARY_FILE, version=version or version_of(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, without anything added; no text becomes a special token.

        Raises:
            InvalidParameterError: not a string, or half of a surrogate pair in it.
        """
        check_text(text, "text")
        return self._pieces.encode(text)

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of the prompt that the original `chat` feeds.

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
        """Ids of a conversation, beginning with `[gMASK] sop`.

        ChatGLM2 has rounds, numbered from 1; a system message stands before the first question.
        ChatGLM3 has a message for each role, ending with `<|assistant|>`. Tools stand in its
        system message, after the caller's own words; a call is an assistant's message whose
        metadata is the tool's name.

        Args:
            messages: what `read_messages` reads.
            tools: in OpenAI's shape; for ChatGLM3 only.

        Raises:
            InvalidParameterError: another order or role, or tools for ChatGLM2.
        """
        prefix = [self.special["[gMASK]"], self.special["sop"]]
        if self.version == 2:
            refuse_tools(tools, self._family)
            questions, answers = questions_and_answers(messages)
            told = [
                f"[Round {number}]\n\n问：{question}\n\n答：{answer}"
                for number, (question, answer) in enumerate(zip(questions, [*answers, ""]), 1)
            ]
            return [*prefix, *self.encode("\n\n".join(told))]
        ids = prefix
        for message in with_tools(read_messages(messages, with_tools=True), read_tools(tools)):
            if message.content or not message.calls:
                ids += self.encode_message(message.role, "", message.content)
            for call in message.calls:
                content = write_python_call(read_json_arguments(call.arguments) or {})
                ids += self.encode_message(message.role, call.name, content)
        return [*ids, self.special["<|assistant|>"]]

    def encode_message(self, role: str, metadata: str, content: str) -> list[int]:
        """Ids of one message of ChatGLM3, as its `build_single_message`.

        Args:
            role: a key of `ROLE_TOKENS`.
            metadata: what stands in the line of the role, "" for ordinary content.
            content: the text.
        """
        header = [self.special[ROLE_TOKENS[role]], *self.encode(f"{metadata}\n")]
        return header + self.encode(content)

    def answer_reader(self, tools: Sequence[Mapping[str, Any]] = ()) -> AnswerReader:
        """A reader for one answer to a conversation with these tools.

        Raises:
            InvalidParameterError: tools of another shape, or for ChatGLM2 any.
        """
        if self.version == 2:
            refuse_tools(tools, self._family)
            return PlainAnswerReader()
        return HeaderAnswerReader(tools, read_python_call)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, as the original decodes it.

        Special tokens, and ids beyond them, stand for no text. Only `<|assistant|>`, with which
        ChatGLM3 begins the next message of the same answer, is written as its name, so that
        `answer_reader` and `process_response` find it.
        """
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one id says by itself: its bytes inside an answer, or a special token's name.

        An id beyond the special tokens says nothing.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._names:
            return self._names[token_id]
        if token_id in self.special_ids:
            return self._pieces.name(token_id)
        return self._pieces.bytes_of(token_id, at_start=False)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer; its deltas join to what `decode` returns."""
        at_start = self._pieces.drops_a_leading_space
        separator = self.special.get(SEPARATOR)

        def token_bytes(token_id: int) -> bytes:
            nonlocal at_start
            token_id = int(token_id)
            if token_id == separator:
                at_start = self._pieces.drops_a_leading_space
                return SEPARATOR.encode("utf-8")
            if not 0 <= token_id < self._pieces.size or token_id in self.special_ids:
                return b""
            written = self._pieces.bytes_of(token_id, at_start)
            at_start = at_start and self._pieces.drops_every_leading_space and not written
            return written

        return IncrementalDetokenizer(token_bytes, errors=BYTE_BY_BYTE)

    def process_response(self, text: str) -> str:
        """What the original does to a complete answer before it shows it.

        Outer whitespace goes, and a placeholder of the training data is filled in. Of a
        ChatGLM3 answer only the last message is left, without its blank metadata line.
        """
        if self.version == 2:
            return text.strip().replace(*TRAINING_TIME)
        return last_message(text)


def with_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Puts the function objects into ChatGLM3's system message, as its `build_chat_input`."""
    if not tools:
        return messages
    system = [message.content for message in messages if message.role == "system"]
    written = json.dumps(list(tools), indent=4, ensure_ascii=False)
    content = "\n".join([*filter(None, system), TOOLS_INSTRUCTION, written])
    return [Message("system", content), *messages[len(system) :]]


def version_of(folder: Path) -> int:
    """Whether a folder holds ChatGLM2 (2) or ChatGLM3 (3).

    Both have the same `tokenizer.model` and the same class names. They differ in their names
    ("THUDM/chatglm2-6b" as `name_or_path` of `tokenizer_config.json` or as `_name_or_path` of
    `config.json`), and newer files of ChatGLM3 name its role tokens. A folder that says nothing
    is taken for ChatGLM3.

    Raises:
        CheckpointError: a file that is not a JSON object.
    """
    tokenizer_config = read_tokenizer_config(folder)
    if "<|user|>" in json.dumps(tokenizer_config):
        return 3
    names = (
        tokenizer_config.get("name_or_path"),
        read_optional(folder, "config.json").get("_name_or_path"),
    )
    known = [name.lower() for name in names if isinstance(name, str)]
    return 2 if any("chatglm2" in name for name in known) else 3
