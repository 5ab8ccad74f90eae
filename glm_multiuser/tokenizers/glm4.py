"""The tokenizer of GLM-4: ranks for tiktoken, and one message for each role.

Follows `tokenization_chatglm.py`, `modeling_chatglm.py` and the chat template of
THUDM/glm-4-9b-chat. Special tokens are not in the file of ranks: their ids follow it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.byte_level import ByteLevelTokenizer, ByteVocabulary
from glm_multiuser.tokenizers.calls import read_json_arguments
from glm_multiuser.tokenizers.header_reader import (
    ROLE_TOKENS,
    SEPARATOR,
    HeaderAnswerReader,
    last_message,
)
from glm_multiuser.tokenizers.history import messages_of
from glm_multiuser.tokenizers.messages import read_messages, read_tools
from glm_multiuser.tokenizers.tiktoken_file import read_tiktoken_file

VOCABULARY_FILE = "tokenizer.model"

SPECIAL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
"""In the order of their ids; the first one follows the last rank."""

NEEDED = ("[gMASK]", "<sop>", "<|endoftext|>", *ROLE_TOKENS.values())
"""Without these there is no prompt and no end."""

TOOLS_INSTRUCTION = (
    "你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
)
CALL_INSTRUCTION = "在调用上述函数时，请使用 Json 格式表示调用的参数。"


class GLM4Tokenizer(ByteLevelTokenizer):
    """Text to ids and back for GLM-4.

    Args:
        vocabulary: with all of `NEEDED` among its special tokens.
        name: of the file, for messages.

    Attributes:
        stop_token_ids: `<|endoftext|>`, `<|user|>` and `<|observation|>`.

    Raises:
        CheckpointError: a special token that is missing.
    """

    def __init__(self, vocabulary: ByteVocabulary, name: Union[str, Path]) -> None:
        for token in NEEDED:
            if token not in vocabulary.special:
                raise CheckpointError(f"{name} has no special token {token!r}; GLM-4 needs one")
        # The model begins the next message of one answer with it, so its reader has to see it.
        separator = {vocabulary.special[SEPARATOR]: SEPARATOR.encode("utf-8")}
        super().__init__(replace(vocabulary, pieces={**vocabulary.pieces, **separator}))
        self.stop_token_ids: tuple[int, ...] = tuple(
            self.special[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")
        )

    @classmethod
    def from_file(cls, file: Union[str, Path]) -> GLM4Tokenizer:
        """Loads a file of ranks, named `tokenizer.model` in the released checkpoints.

        Raises:
            CheckpointError: a file that is missing or broken.
        """
        return cls(read_tiktoken_file(Path(file), SPECIAL_TOKENS), file)

    def encode_prompt(self, query: str, history: Optional[Sequence[Any]] = ()) -> list[int]:
        """Ids of a question with its history.

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
        """Ids of a conversation, from `[gMASK] <sop>` to `<|assistant|>`.

        As in the original's template, tools stand in a system message of their own before the
        caller's, messages without content are left out, and a call is an assistant's message
        whose metadata is the tool's name and whose content is the arguments.

        Args:
            messages: what `read_messages` reads.
            tools: in OpenAI's shape.

        Raises:
            InvalidParameterError: another order, role or shape.
        """
        ids = [self.special["[gMASK]"], self.special["<sop>"]]
        told = read_messages(messages, with_tools=True)
        functions = read_tools(tools)
        if functions:
            ids += self.encode_message("system", "", _described(functions))
        for message in told:
            if message.content:
                ids += self.encode_message(message.role, "", message.content)
            for call in message.calls:
                ids += self.encode_message(message.role, call.name, call.arguments)
        return [*ids, self.special["<|assistant|>"]]

    def encode_message(self, role: str, metadata: str, content: str) -> list[int]:
        """Ids of one message, as `build_single_message` of the original.

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
            InvalidParameterError: tools of another shape.
        """
        return HeaderAnswerReader(tools, _read_call)

    @staticmethod
    def process_response(text: str) -> str:
        """What the original does to a complete answer before it shows it.

        Only the last message is left, without its blank metadata line and outer whitespace, and
        a placeholder of the training data is filled in.
        """
        return last_message(text)


def _described(functions: Sequence[Mapping[str, Any]]) -> str:
    described = [
        f"\n\n## {function['name']}\n\n"
        f"{json.dumps(function, ensure_ascii=False, indent=4)}\n{CALL_INSTRUCTION}"
        for function in functions
    ]
    return TOOLS_INSTRUCTION + "".join(described)


def _read_call(content: str) -> Optional[str]:
    return content.strip() if read_json_arguments(content) is not None else None
