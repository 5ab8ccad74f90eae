"""Tokenizers of ChatGLM2 and ChatGLM3: one sentencepiece file, two prompt formats.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm2-6b and
THUDM/chatglm3-6b, which share `tokenizer.model`. Special tokens are not in that file: their ids
follow its pieces, so text never encodes to one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Optional, Union

from glm_multiuser.checkpoint.files import read_optional
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.calls import (
    FENCE,
    FENCE_END,
    read_json_arguments,
    read_python_call,
    write_python_call,
)
from glm_multiuser.tokenizers.folder import read_tokenizer_config
from glm_multiuser.tokenizers.headers import (
    ROLE_TOKENS,
    TRAINING_TIME,
    HeaderAnswerReader,
    HeaderTokenizer,
)
from glm_multiuser.tokenizers.messages import (
    Message,
    questions_and_answers,
    read_messages,
    read_tools,
    refuse_tools,
)
from glm_multiuser.tokenizers.sentencepiece_file import SentencePieceFile
from glm_multiuser.tokenizers.text import Objects

VOCABULARY_FILE = "tokenizer.model"

COMMON_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
SPECIAL_TOKENS = {2: COMMON_TOKENS, 3: (*COMMON_TOKENS, *ROLE_TOKENS.values())}
"""By version, in id order; the first id follows the last piece of the file."""

TOOLS_INSTRUCTION = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
"""Precedes the tools in ChatGLM3's system message, as in THUDM/ChatGLM3."""

UNSUPPORTED_SETTINGS = {"remove_space": False, "do_lower_case": False}
"""Settings that change every id, with the only value in the released files."""


class ChatGLM2Tokenizer(HeaderTokenizer):
    """Tokenizer of ChatGLM3, and with `version=2` of ChatGLM2.

    Args:
        file: a sentencepiece model file, named `tokenizer.model` in the released checkpoints.
        version: 2 or 3.

    Attributes:
        special: ids by name of the special tokens outside the file.
        stop_token_ids: `</s>`, and for ChatGLM3 `<|user|>` and `<|observation|>`.

    Raises:
        CheckpointError: a missing or broken file, or ChatGLM-6B's.
        ConfigError: any other version.
    """

    calls_are_json = False
    version = 3
    _around_arguments = (f"{FENCE}tool_call(**", f")\n{FENCE_END}")

    def __init__(self, file: Union[str, Path], *, version: int = 3) -> None:
        if version not in SPECIAL_TOKENS:
            raise ConfigError(f"version is {version!r}; it must be 2 or 3")
        self.version = version
        self._strips_answers = version == 3
        pieces = SentencePieceFile(file)
        if pieces.find("[gMASK]") is not None:
            raise CheckpointError(
                f"{file} has a piece '[gMASK]', as the file ice_text.model of ChatGLM-6B has; "
                f"ChatGLM{version} needs a file without special tokens"
            )
        pieces.refuse_as_text("</s>")
        vocabulary = pieces.vocabulary()
        special = {name: pieces.size + place for place, name in enumerate(SPECIAL_TOKENS[version])}
        super().__init__(replace(vocabulary, special={**vocabulary.special, **special}))
        self.special = special
        ends = [] if version == 2 else [special["<|user|>"], special["<|observation|>"]]
        self.stop_token_ids = (pieces.eos_id, *ends)

    @classmethod
    def from_folder(
        cls, folder: Union[str, Path], *, version: Optional[int] = None
    ) -> ChatGLM2Tokenizer:
        """Loads `tokenizer.model` with the settings of `tokenizer_config.json`, if there is one.

        The version defaults to that of `version_of`.

        Raises:
            CheckpointError: as the class, or an unsupported setting.
        """
        folder = Path(folder)
        read_tokenizer_config(folder, UNSUPPORTED_SETTINGS)
        return cls(folder / VOCABULARY_FILE, version=version or version_of(folder))

    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Encodes a conversation, starting with `[gMASK] sop`.

        ChatGLM2 numbers rounds from 1; see `questions_and_answers`. ChatGLM3 writes one message
        per role and ends with `<|assistant|>`. Its first system message lists the tools after the
        caller's text; a call is an assistant message with the tool's name as metadata.
        """
        ids = [self.special["[gMASK]"], self.special["sop"]]
        if self.version == 2:
            refuse_tools(tools, "ChatGLM2")
            questions, answers = questions_and_answers(messages, continue_final_message)
            rounds = [
                f"[Round {number}]\n\n问：{question}\n\n答：{answer}"
                for number, (question, answer) in enumerate(zip(questions, [*answers, ""]), 1)
            ]
            return [*ids, *self.encode("\n\n".join(rounds))]
        conversation = read_messages(messages, continue_final_message, with_tools=True)
        for message in with_tools(conversation, read_tools(tools)):
            if message.content or not message.calls:
                ids += self.encode_message(message.role, "", message.content)
            for call in message.calls:
                content = write_python_call(read_json_arguments(call.arguments) or {})
                ids += self.encode_message(message.role, call.name, content)
        return ids if continue_final_message else [*ids, self.special["<|assistant|>"]]

    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        if self.version == 2:
            refuse_tools(tools, "ChatGLM2")
            return AnswerReader()
        return HeaderAnswerReader(
            tools, read_python_call, continued=continued, around=self._around_arguments
        )

    def call_rule(self, name: str, arguments: str) -> str:
        if self.version == 2:
            refuse_tools([name], "ChatGLM2")
        return super().call_rule(name, arguments)

    def process_response(self, text: str) -> str:
        """Post-processes a complete answer as the original does.

        Strips outer whitespace and fills in a placeholder of the training data. Keeps only the
        last message of a ChatGLM3 answer, without its blank metadata line.
        """
        if self.version == 2:
            return text.strip().replace(*TRAINING_TIME)
        return super().process_response(text)


class ChatGLM3WithSpecialTokens(ChatGLM2Tokenizer):
    """Tokenizer of ChatGLM3 from a vocabulary that has all of its special tokens, as GGUF files."""

    def __init__(self, vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> None:
        HeaderTokenizer.__init__(self, vocabulary)
        self.stop_token_ids = stop_token_ids


def with_tools(messages: list[Message], tools: Objects) -> list[Message]:
    """Adds the function objects to the first system message, like ChatGLM3's `build_chat_input`."""
    if not tools:
        return messages
    system = [message.content for message in messages[:1] if message.role == "system"]
    written = json.dumps(list(tools), indent=4, ensure_ascii=False)
    content = "\n".join([*filter(None, system), TOOLS_INSTRUCTION, written])
    return [Message("system", content), *messages[len(system) :]]


def version_of(folder: Path) -> int:
    """Returns 2 for a folder of ChatGLM2, 3 for ChatGLM3.

    Both share `tokenizer.model` and class names. They differ in the model's name
    ("THUDM/chatglm2-6b" as `name_or_path` of `tokenizer_config.json` or `_name_or_path` of
    `config.json`), and newer files of ChatGLM3 list its role tokens. Defaults to ChatGLM3.

    Raises:
        CheckpointError: a file that is not a JSON object.
    """
    tokenizer_config = read_tokenizer_config(folder)
    if "<|user|>" in json.dumps(tokenizer_config):
        return 3
    config = read_optional(folder / "config.json")
    names = f"{tokenizer_config.get('name_or_path')} {config.get('_name_or_path')}"
    return 2 if "chatglm2" in names.lower() else 3
