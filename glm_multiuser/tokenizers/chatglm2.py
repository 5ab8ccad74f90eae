"""The tokenizers of ChatGLM2 and ChatGLM3: one sentencepiece file, two forms of a prompt.

Follows `tokenization_chatglm.py` and `modeling_chatglm.py` of THUDM/chatglm2-6b and
THUDM/chatglm3-6b, whose `tokenizer.model` is the same file. Special tokens are not in that file:
their ids follow its pieces, so no text becomes one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Optional, Union

from glm_multiuser.checkpoint.files import read_optional
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.calls import (
    CLOSING,
    OPENING,
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
"""Of each version, in the order of their ids; the first one follows the last piece of the file."""

TOOLS_INSTRUCTION = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
"""Precedes the tools in ChatGLM3's system message; wording of THUDM/ChatGLM3."""

UNSUPPORTED_SETTINGS = {"remove_space": False, "do_lower_case": False}
"""Settings that would change every id, with the only value that the released files use."""


class ChatGLM2Tokenizer(HeaderTokenizer):
    """Text to ids and back for ChatGLM3, and with `version=2` for ChatGLM2.

    Args:
        file: a sentencepiece model file, named `tokenizer.model` in the released checkpoints.
        version: 2 or 3.

    Attributes:
        special: id of each special token that is not in the file.
        stop_token_ids: `</s>`, and for ChatGLM3 `<|user|>` and `<|observation|>`.

    Raises:
        CheckpointError: a file that is missing or broken, or the one of ChatGLM-6B.
        ConfigError: another version.
    """

    calls_are_json = False
    _around_arguments = (f"{OPENING}tool_call(**", f")\n{CLOSING}")

    def __init__(self, file: Union[str, Path], *, version: int = 3) -> None:
        if version not in SPECIAL_TOKENS:
            raise ConfigError(f"version is {version!r}; it must be 2 or 3")
        self.version = version
        self._strips_answers = version == 3
        self._family = f"ChatGLM{version}"
        pieces = SentencePieceFile(file)
        if pieces.find("[gMASK]") is not None:
            raise CheckpointError(
                f"{file} has a piece '[gMASK]', as the file ice_text.model of ChatGLM-6B has; "
                f"{self._family} needs a file without special tokens"
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

        Without a version, it is what `version_of` finds.

        Raises:
            CheckpointError: as the class does, or a setting that this version cannot follow.
        """
        folder = Path(folder)
        read_tokenizer_config(folder, UNSUPPORTED_SETTINGS)
        return cls(folder / VOCABULARY_FILE, version=version or version_of(folder))

    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Ids of a conversation, beginning with `[gMASK] sop`.

        ChatGLM2 has rounds, numbered from 1; see `questions_and_answers`. ChatGLM3 has a message
        for each role, ending with `<|assistant|>`. Tools are listed in its first system message,
        after the caller's own words; a call is an assistant's message whose metadata is the tool's
        name.
        """
        ids = [self.special["[gMASK]"], self.special["sop"]]
        if self.version == 2:
            refuse_tools(tools, self._family)
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
            refuse_tools(tools, self._family)
            return AnswerReader()
        return HeaderAnswerReader(
            tools, read_python_call, continued=continued, around=self._around_arguments
        )

    def call_rule(self, name: str, arguments: str) -> str:
        if self.version == 2:
            refuse_tools([name], self._family)
        return super().call_rule(name, arguments)

    def process_response(self, text: str) -> str:
        """What the original does to a complete answer before it shows it.

        Outer whitespace goes, and a placeholder of the training data is filled in. Of a
        ChatGLM3 answer only the last message is left, without its blank metadata line.
        """
        if self.version == 2:
            return text.strip().replace(*TRAINING_TIME)
        return super().process_response(text)


def with_tools(messages: list[Message], tools: Objects) -> list[Message]:
    """Puts the function objects into the system message that ChatGLM3's conversations begin with.

    As its `build_chat_input` does.
    """
    if not tools:
        return messages
    system = [message.content for message in messages[:1] if message.role == "system"]
    written = json.dumps(list(tools), indent=4, ensure_ascii=False)
    content = "\n".join([*filter(None, system), TOOLS_INSTRUCTION, written])
    return [Message("system", content), *messages[len(system) :]]


def version_of(folder: Path) -> int:
    """Whether a folder holds ChatGLM2 (2) or ChatGLM3 (3).

    Both have the same `tokenizer.model` and the same class names. They differ in their names
    ("THUDM/chatglm2-6b" as `name_or_path` of `tokenizer_config.json` or as `_name_or_path` of
    `config.json`), and newer files of ChatGLM3 name its role tokens. A folder without
    any of these is taken for ChatGLM3.

    Raises:
        CheckpointError: a file that is not a JSON object.
    """
    tokenizer_config = read_tokenizer_config(folder)
    if "<|user|>" in json.dumps(tokenizer_config):
        return 3
    config = read_optional(folder / "config.json")
    names = f"{tokenizer_config.get('name_or_path')} {config.get('_name_or_path')}"
    return 2 if "chatglm2" in names.lower() else 3
