"""What MindFormers' `GLMConfig` has to be told about a model."""

from __future__ import annotations

from typing import Any

from glm_multiuser.config import ModelConfig
from glm_multiuser.errors import ConfigError

SEQ_LENGTH = 512
"""MindFormers' own default for GLM. Its caches always have this length, and every step computes
over all of it, so it is not simply the longest that the model can."""


def glm_config_arguments(config: ModelConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    """The keyword arguments of `GLMConfig` for this model, with its caches switched on.

    Args:
        config: the model.
        seq_length: tokens of prompt and answer together, at most its `max_sequence_length`.
        dtype: "float32" or "float16", of the weights and of what is computed with them. Norms
            and softmax are float32 in either case, by MindFormers' own default.

    Raises:
        ConfigError: an argument out of its range, or a model that MindFormers cannot compute.
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_attention_heads,
        "inner_hidden_size": config.inner_hidden_size,
        "seq_length": seq_length,
        "layernorm_epsilon": config.layernorm_epsilon,
        "activation_func": "GELU",
        "use_past": True,
        "param_init_type": dtype,
        "compute_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "mask_token_id": config.mask_token_id,
        "gmask_token_id": config.gmask_token_id,
        "pad_token_id": config.pad_token_id,
    }
