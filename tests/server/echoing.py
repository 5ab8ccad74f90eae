"""A model that echoes the last message byte by byte, so tests determine its answers.

Its tokenizer parses answers like ChatGLM3's, so a test's text can have a blank header, call a tool,
or contain text that only looks like a call. It is causal, so sessions use the prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.engine.request import Request
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.tokenizers import AnswerReader, ChatTokenizer
from glm_multiuser.tokenizers.answers import TaggedAnswerReader
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.calls import read_python_call, write_python_call
from glm_multiuser.tokenizers.headers import SEPARATOR, HeaderAnswerReader
from glm_multiuser.tokenizers.messages import read_messages, read_tools
from tests.engine.mock_runner import MockRunner

SEQ_LENGTH = 4096
BYTES = 256
END, MESSAGE, NEXT = BYTES, BYTES + 1, BYTES + 2
"""Ids after the byte ids: end, beginning of a message, and `SEPARATOR`."""
VOCAB = BYTES + 3
CHUNK = 64


class EchoTokenizer(ChatTokenizer):
    """A token is a byte of UTF-8, or `SEPARATOR`."""

    separator = SEPARATOR
    stop_token_ids = (END,)
    _strips_answers = True

    def __init__(self) -> None:
        pieces = {byte: bytes([byte]) for byte in range(BYTES)}
        super().__init__(Vocabulary(_encode, pieces, {SEPARATOR: NEXT}))
        self.vocab_size = VOCAB

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final_message: bool = False,
    ) -> list[int]:
        texts = [json.dumps(read_tools(tools))] if tools else []
        for message in read_messages(
            messages, with_tools=True, continue_final_message=continue_final_message
        ):
            calls = [f"{call.name}\n{call.arguments}" for call in message.calls]
            texts.append("".join([*calls, message.content]))
        return [one for text in texts for one in (MESSAGE, *self.encode(text))]

    def answer_reader(
        self, tools: Sequence[Mapping[str, Any]] = (), *, continued: bool = False
    ) -> AnswerReader:
        return HeaderAnswerReader(tools, read_python_call, continued=continued)


def _encode(text: str) -> list[int]:
    first, *others = text.split(SEPARATOR)
    return [*first.encode(), *(one for other in others for one in (NEXT, *other.encode()))]


class TaggedEchoTokenizer(EchoTokenizer):
    """Parses answers like Qwen2.5's."""

    _strips_answers = False

    def answer_reader(
        self, tools: Sequence[Mapping[str, Any]] = (), *, continued: bool = False
    ) -> AnswerReader:
        return TaggedAnswerReader(tools) if tools else AnswerReader()


class EchoRunner(MockRunner):
    """Implements `engine.runner.Runner`: echoes the last message, whatever else a slot holds."""

    vocab_size = VOCAB

    def _lay_out(self, users: int) -> None:
        self.memory = np.full((users, SEQ_LENGTH), np.nan)

    def _logits(self, slot: int, request: Request, length: int) -> NDArray[np.float32]:
        prompt, said = request.prompt_token_ids, len(request.output_token_ids)
        begin = len(prompt) - prompt[::-1].index(MESSAGE) + said
        logits = np.zeros(VOCAB, np.float32)
        logits[prompt[begin] if begin < len(prompt) else END] = 50.0
        return logits


def echo_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """Replaces `MultiUserLLM.from_pretrained`."""
    config = replace(settings.engine, seq_length=SEQ_LENGTH)
    runner: Any = EchoRunner(config.users, chunk=CHUNK)
    params = SamplingParams(temperature=0.0)
    return MultiUserLLM(runner, config, EchoTokenizer(), params, (END,), 0.0)


def tagged_echo_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """`echo_llm` that calls tools as Qwen2.5 does."""
    llm = echo_llm(settings, **options)
    llm.tokenizer = TaggedEchoTokenizer()
    return llm


def message(text: str) -> str:
    """An answer that is ordinary content, as ChatGLM3 writes it."""
    return f"\n {text}"


def call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, as ChatGLM3 writes it."""
    return f"{name}\n {write_python_call(arguments)}"


def tagged_call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, as Qwen2.5 writes it."""
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def together(*messages: str) -> str:
    """An answer of several messages."""
    return SEPARATOR.join(messages)
