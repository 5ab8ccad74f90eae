"""Configuration arguments with which MindFormers loads a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import AnyModelConfig, CausalConfig, ChatGLM6BConfig

MODEL_CLASSES = {
    "chatglm_6b": ("GLMConfig", "GLMChatModel"),
    "chatglm2": ("ChatGLM2Config", "ChatGLM2ForConditionalGeneration"),
}
"""Family -> MindFormers' classes."""

SEQ_LENGTH = 512
"""MindFormers' default for GLM. Its caches always have this length, and every step computes over
all of it, so the model's maximum would be slow."""


def mindformers_arguments(
    model: AnyModelConfig, values: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Returns the keyword arguments of the family's configuration in MindFormers 1.3.2.

    `values` is the `config.json` of the model; `dtype` as in `glm_config_arguments`.

    Raises:
        ConfigError: a model that MindFormers does not support.
    """
    seq_length = min(SEQ_LENGTH, model.max_sequence_length)
    if isinstance(model, ChatGLM6BConfig):
        return glm_config_arguments(model, seq_length, dtype)
    return _glm2_arguments(model, values, seq_length, dtype)


def glm_config_arguments(config: ChatGLM6BConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    """Returns the keyword arguments of `GLMConfig` for this model, with caches enabled.

    Args:
        seq_length: tokens of prompt and answer together, at most its `max_sequence_length`.
        dtype: "float32" or "float16", of weights and computation. Norms and softmax are always
            float32, MindFormers' default.

    Raises:
        ConfigError: an argument out of its range, or a model that MindFormers does not support.
    """
    if dtype not in ("float32", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; it must be 'float32' or 'float16'")
    if not 1 <= seq_length <= config.max_sequence_length:
        raise ConfigError(
            f"seq_length is {seq_length}; it must be between 1 and this model's "
            f"max_sequence_length {config.max_sequence_length}"
        )
    if config.deepnorm_layers not in (None, config.num_layers):
        raise ConfigError(
            f"deepnorm_layers is {config.deepnorm_layers} and num_layers {config.num_layers}; "
            "MindFormers' GLM always takes num_layers for both and would give other answers"
        )
    return {
        **_common_arguments(config, seq_length, dtype),
        "vocab_size": config.vocab_size,
        "num_heads": config.num_attention_heads,
        "inner_hidden_size": config.inner_hidden_size,
        "activation_func": "GELU",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "mask_token_id": config.mask_token_id,
        "gmask_token_id": config.gmask_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _glm2_arguments(
    model: CausalConfig, values: Mapping[str, Any], seq_length: int, dtype: str
) -> dict[str, Any]:
    """For `ChatGLM2Config` (mindformers/models/glm2/glm2_config.py), which GLM-4 uses, too."""
    if model.tied:
        raise ConfigError("tie_word_embeddings is true; MindFormers' GLM2 does not tie them")
    if model.rotary_dim * 2 != model.head_dim:
        raise ConfigError(
            f"rotary_dim is {model.rotary_dim}; MindFormers' GLM2 always rotates half of head_dim, "
            f"{model.head_dim}"
        )
    if model.rope_scaling is not None:
        raise ConfigError(f"rope_scaling is {model.rope_scaling}; MindFormers' GLM2 scales nothing")
    ids = model.eos_token_ids
    if not ids:
        raise ConfigError("eos_token_id is missing; MindFormers' GLM2 needs one")
    return {
        **_common_arguments(model, seq_length, dtype),
        "padded_vocab_size": model.vocab_size,
        "num_attention_heads": model.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.inner_hidden_size,
        "rope_ratio": model.rope_theta / 10000,
        "add_qkv_bias": model.qkv_bias,
        "eos_token_id": ids[0] if len(ids) == 1 else list(ids),
        "pad_token_id": values.get("pad_token_id") or 0,
    }


def _common_arguments(model: AnyModelConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "seq_length": seq_length,
        "layernorm_epsilon": model.layernorm_epsilon,
        "use_past": True,
        "param_init_type": dtype,
        "compute_dtype": dtype,
    }
