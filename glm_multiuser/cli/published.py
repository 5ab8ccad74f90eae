"""The shapes of published models, for plans without their files.

From the `config.json` of THUDM/chatglm-6b, chatglm2-6b, chatglm3-6b and glm-4-9b-chat, and of
Qwen's Qwen2-*-Instruct and Qwen2.5-*-Instruct; both have the same 0.5B, 1.5B and 7B.
"""

from __future__ import annotations

from glm_multiuser.model_config import AnyModelConfig, CausalConfig, ChatGLM6BConfig


def _chatglm(
    vocab_size: int, layers: int, sequence: int, eos: tuple[int, ...], rope_ratio: int = 1
) -> CausalConfig:
    return CausalConfig(
        family="chatglm2",
        vocab_size=vocab_size,
        hidden_size=4096,
        num_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        inner_hidden_size=13696,
        max_sequence_length=sequence,
        eos_token_ids=eos,
        rotary_dim=64,
        rope_theta=10000.0 * rope_ratio,
        rotary_interleaved=True,
    )


def _qwen2(
    vocab_size: int, hidden: int, layers: int, heads: int, groups: int, inner: int, tied: bool
) -> CausalConfig:
    return CausalConfig(
        family="qwen2",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        inner_hidden_size=inner,
        max_sequence_length=32768,
        eos_token_ids=(151645, 151643),
        rotary_dim=hidden // heads,
        rope_theta=1e6,
        tied=tied,
    )


def published_dtype(name: str) -> str:
    """Returns the stored type of a published model's weights."""
    return "float16" if name.startswith("chatglm") else "bfloat16"


PUBLISHED: dict[str, AnyModelConfig] = {
    "chatglm-6b": ChatGLM6BConfig(130528, 4096, 28, 32, 16384),
    "chatglm2-6b": _chatglm(65024, 28, 32768, (2,)),
    "chatglm3-6b": _chatglm(65024, 28, 8192, (2,)),
    "glm-4-9b-chat": _chatglm(151552, 40, 131072, (151329, 151336, 151338), 500),
    "qwen2-0.5b": _qwen2(151936, 896, 24, 14, 2, 4864, tied=True),
    "qwen2-1.5b": _qwen2(151936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(151936, 2048, 36, 16, 2, 11008, tied=True),
    "qwen2-7b": _qwen2(152064, 3584, 28, 28, 4, 18944, tied=False),
    "qwen2.5-14b": _qwen2(152064, 5120, 48, 40, 8, 13824, tied=False),
    "qwen2.5-32b": _qwen2(152064, 5120, 64, 40, 8, 27648, tied=False),
}
