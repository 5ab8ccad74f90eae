"""Tokenizers of GLM-4: tiktoken ranks, and one message per role.

Follows `tokenization_chatglm.py`, `modeling_chatglm.py` and the chat template of
THUDM/glm-4-9b-chat. Special tokens are not in the rank file: their ids follow the ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

from glm_multiuser.tokenizers.answers import AnswerReader
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.calls import read_json_arguments, write_json
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.headers import ROLE_TOKENS, HeaderAnswerReader, HeaderTokenizer
from glm_multiuser.tokenizers.hugging_face import HuggingFaceTokenizer
from glm_multiuser.tokenizers.messages import Message, read_messages, read_tools
from glm_multiuser.tokenizers.text import Objects
from glm_multiuser.tokenizers.tiktoken_file import read_tiktoken_file

SPECIAL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *ROLE_TOKENS.values(),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
"""In id order; the first id follows the last rank."""

NEEDED = ("[gMASK]", "<sop>", "<|endoftext|>", *ROLE_TOKENS.values())
"""Tokens that every prompt and every end of an answer needs."""

ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")

TOOLS_INSTRUCTION = (
    "你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
)
INSTRUCTION_OF_TEMPLATE = re.compile(r"<\|system\|>\n([^{}]*# 可用工具)\{%")
"""Finds it in a chat template; some of the published ones have "ChatGLM" for the name."""

CALL_INSTRUCTION = "在调用上述函数时，请使用 Json 格式表示调用的参数。"


class GLM4Tokenizer(HeaderTokenizer):
    """Tokenizer of GLM-4, for a vocabulary with all of `NEEDED`.

    Args:
        template: its `TOOLS_INSTRUCTION` is used, if it has one.

    Attributes:
        stop_token_ids: `<|endoftext|>`, `<|user|>` and `<|observation|>`.
    """

    def __init__(self, vocabulary: Vocabulary, template: Optional[ChatTemplate] = None) -> None:
        super().__init__(vocabulary)
        self.stop_token_ids = tuple(self.special[token] for token in ENDS)
        found = INSTRUCTION_OF_TEMPLATE.search(template.source) if template is not None else None
        self._tools_instruction = found[1] if found else TOOLS_INSTRUCTION

    @classmethod
    def from_file(
        cls, file: Union[str, Path], template: Optional[ChatTemplate] = None
    ) -> GLM4Tokenizer:
        """Loads a tiktoken rank file, named `tokenizer.model` in the released checkpoints.

        Raises:
            CheckpointError: a missing or broken file.
        """
        return cls(read_tiktoken_file(Path(file), SPECIAL_TOKENS), template)

    def encode_messages(
        self, messages: Objects, tools: Objects = (), *, continue_final_message: bool = False
    ) -> list[int]:
        """Encodes a conversation, from `[gMASK] <sop>` to `<|assistant|>`.

        As in the original template, tools get a separate system message before the caller's,
        messages without content are skipped, and a call is an assistant message with the tool's
        name as metadata and the arguments as content.
        """
        ids = [self.special["[gMASK]"], self.special["<sop>"]]
        conversation = read_messages(messages, continue_final_message, with_tools=True)
        functions = read_tools(tools)
        if functions:
            ids += self.encode_message(
                "system", "", self._tools_instruction + _described(functions)
            )
        for message in conversation:
            if message.content or (continue_final_message and message is conversation[-1]):
                ids += self.encode_message(message.role, "", message.content)
            for call in message.calls:
                ids += self.encode_message(message.role, call.name, call.arguments)
        return ids if continue_final_message else [*ids, self.special["<|assistant|>"]]

    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        return HeaderAnswerReader(tools, read_call, continued=continued)


class GLM40414Tokenizer(HeaderTokenizer, HuggingFaceTokenizer):
    """Tokenizer of GLM-4-0414, whose chat template renders tools itself, and of other models with
    GLM-4's special tokens and a template of their own, such as GLM-Edge.

    Answers have GLM-4's format. The template expects calls as messages with `metadata`, and tool
    results with the role `observation`.
    """

    def answer_reader(self, tools: Objects = (), *, continued: bool = False) -> AnswerReader:
        self._check_tools(tools)
        return HeaderAnswerReader(tools, read_call, continued=continued)

    @property
    def _takes_tools(self) -> bool:
        return self._template is not None and self._template.takes_tools

    def _template_messages(
        self, message: Message, escape: Callable[[Any], Any]
    ) -> list[dict[str, Any]]:
        role = "observation" if message.role == "tool" else message.role
        written = [{"role": role, "content": escape(message.content)}]
        if message.calls and not message.content:
            written = []
        for call in message.calls:
            content = escape(call.arguments)
            written.append({"role": role, "metadata": escape(call.name), "content": content})
        return written


def _described(functions: Objects) -> str:
    return "".join(
        f"\n\n## {function['name']}\n\n"
        f"{json.dumps(function, ensure_ascii=False, indent=4)}\n{CALL_INSTRUCTION}"
        for function in functions
    )


def read_call(content: str) -> Optional[str]:
    """Returns a call's content if it is the text of a JSON object, otherwise None."""
    values = read_json_arguments(content)
    if values is None:
        return None
    try:
        write_json(values)
    except ValueError:  # half of a surrogate pair, which clients could not read
        return None
    return content.strip()
