"""What MindFormers has to be told about a model whose weights it loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_multiuser.config import AnyModelConfig, CausalConfig, ModelConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.mindformers.config import SEQ_LENGTH, glm_config_arguments

MODEL_CLASSES = {
    "chatglm-6b": ("GLMConfig", "GLMChatModel"),
    "chatglm": ("ChatGLM2Config", "ChatGLM2ForConditionalGeneration"),
}
"""Family -> MindFormers' classes."""


def mindformers_arguments(
    model: AnyModelConfig, values: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The keyword arguments of the family's configuration in MindFormers 1.3.2.

    Args:
        model: of a family in `MODEL_CLASSES`.
        values: its `config.json`.
        dtype: "float32" or "float16", of the weights and of what is computed with them.

    Raises:
        ConfigError: a model that MindFormers cannot compute.
    """
    seq_length = min(SEQ_LENGTH, model.max_sequence_length)
    if isinstance(model, ModelConfig):
        return glm_config_arguments(model, seq_length, dtype)
    return _glm2_arguments(model, values, seq_length, dtype)


def _glm2_arguments(
    model: CausalConfig, values: Mapping[str, Any], seq_length: int, dtype: str
) -> dict[str, Any]:
    """For `ChatGLM2Config` (mindformers/models/glm2/glm2_config.py), which computes GLM-4, too."""
    if model.tied:
        raise ConfigError("tie_word_embeddings is true; MindFormers' GLM2 does not tie them")
    if model.rotary_dim * 2 != model.head_dim:
        raise ConfigError(
            f"rotary_dim is {model.rotary_dim}; MindFormers' GLM2 always turns half of head_dim, "
            f"{model.head_dim}"
        )
    ids = model.eos_token_ids
    return {
        "padded_vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.inner_hidden_size,
        "seq_length": seq_length,
        "layernorm_epsilon": model.layernorm_epsilon,
        "rope_ratio": model.rope_theta / 10000,
        "add_qkv_bias": model.qkv_bias,
        "use_past": True,
        "param_init_type": dtype,
        "compute_dtype": dtype,
        "eos_token_id": ids[0] if len(ids) == 1 else list(ids),
        "pad_token_id": values.get("pad_token_id") or 0,
    }
