"""Small random models on the real device, and answers to prompts of various lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from glm_multiuser import GenerationResult, ModelConfig, MultiUserLLM, SamplingParams
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.model_config import CausalConfig

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    inner_hidden_size=128,
    max_sequence_length=64,
    bos_token_id=92,
    eos_token_id=93,
    mask_token_id=94,
    gmask_token_id=95,
)
CAUSAL = CausalConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    inner_hidden_size=128,
    max_sequence_length=64,
    eos_token_ids=(93,),
    rotary_dim=16,
)
SEQ_LENGTH = 28
FLOAT32 = 4

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def prompt(seed: int, length: int) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, 90, length).tolist()
    return token_ids


# With blocks of 20 positions one stays in the first, one crosses into the second, one begins there.
PROMPTS = [prompt(1, 3), prompt(2, 12), prompt(3, 21)]


class Heard:
    """Tokens with their log-probabilities, which reveal errors too small to change a token."""

    def __init__(self, result: GenerationResult) -> None:
        assert result.finish_reason == "length"
        assert result.logprobs is not None
        self.token_ids = result.token_ids
        self.logprobs = [one.logprob for one in result.logprobs]

    def __eq__(self, other: object) -> bool:
        # Other numbers of slots may be computed with other roundings.
        return (
            isinstance(other, Heard)
            and self.token_ids == other.token_ids
            and np.allclose(self.logprobs, other.logprobs, rtol=0.0, atol=1e-6)
        )

    def __repr__(self) -> str:
        return f"{self.token_ids} {self.logprobs}"

    @property
    def bits(self) -> Any:
        """For bitwise comparison."""
        return self.token_ids, self.logprobs


def answers(llm: MultiUserLLM, prompts: list[list[int]] = PROMPTS) -> list[Heard]:
    return [Heard(one) for one in llm.generate(prompts, GREEDY)]


def one_by_one(llm: MultiUserLLM, prompts: list[list[int]] = PROMPTS) -> list[Heard]:
    """Answers generated one by one in the same slot."""
    return [answers(llm, [one])[0] for one in prompts]


def cache_bytes(llm: MultiUserLLM) -> int:
    """Bytes of all users' KV caches."""
    parameters = llm._runner.model.get_parameters()
    caches = [one for one in parameters if one.name.endswith(("key_past", "value_past"))]
    held: int = DEVICE_THREAD.call(lambda: sum(cache.nbytes for cache in caches))
    return held
