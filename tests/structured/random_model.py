"""An engine whose logits are random numbers that depend on what the slot's memory holds."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.request import Request
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.engine.mock_runner import MockRunner
from tests.server.process import ROOT

SEQ_LENGTH = 2048
CHUNK = 64
PADDING = 3
"""Ids of the model behind those of the tokenizer."""


class RandomRunner(MockRunner):
    """Fulfils `engine.runner.Runner`. The last token makes the logits of its request NaN."""

    def __init__(self, users: int, vocab_size: int, **options: Any) -> None:
        self.vocab_size = vocab_size
        super().__init__(users, chunk=CHUNK, **options)

    def _lay_out(self, users: int) -> None:
        self.memory = np.full((users, SEQ_LENGTH), np.nan)

    def _logits(self, slot: int, request: Request, length: int) -> NDArray[np.float32]:
        held = self.memory[slot, :length]
        if np.isnan(held).any() or self.vocab_size - 1 in request.prompt_token_ids:
            return np.full(self.vocab_size, np.nan, np.float32)
        seed = zlib.crc32(held.tobytes())
        return np.random.default_rng(seed).normal(0, 3, self.vocab_size).astype(np.float32)


def random_llm(
    tokenizer: Optional[ChatTokenizer], users: int = 2, max_queue: int = 64, **options: Any
) -> MultiUserLLM:
    vocab_size = (tokenizer.vocab_size if tokenizer else 50) + PADDING
    config = replace(EngineConfig(users, SEQ_LENGTH, max_queue=max_queue), seq_length=SEQ_LENGTH)
    runner: Any = RandomRunner(users, vocab_size, **options)
    stops = tokenizer.stop_token_ids if tokenizer else (0,)
    params = SamplingParams(temperature=0.0, max_tokens=300)
    return MultiUserLLM(runner, config, tokenizer, params, stops, 0.0)


def chatglm3_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """In the place of `MultiUserLLM.from_pretrained`."""
    tokenizer = load_tokenizer(ROOT / "ckpt/chatglm3-tiny")
    return random_llm(tokenizer, settings.engine.users, settings.engine.max_queue)


def brief_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """The same, whose strings, lists and objects end soon, also where nothing bounds them."""
    llm = chatglm3_llm(settings)
    assert llm.tokenizer is not None
    ends = (b'"', b"]", b"}")
    table = llm.tokenizer.token_table(llm.tokenizer.vocab_size)
    bias = {token_id: 20.0 for token_id, written in enumerate(table) if written in ends}
    llm.default_params = replace(llm.default_params, logit_bias=bias)
    return llm
