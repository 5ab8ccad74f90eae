"""Qwen2 as transformers stores it: modeling_qwen2.py there; its names are our parameters'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from glm_multiuser.checkpoint.layouts.fields import (
    eos_token_ids,
    only,
    positive,
    switch,
    whole,
    with_rope_parameters,
)
from glm_multiuser.checkpoint.placement import Placement
from glm_multiuser.config import CausalConfig
from glm_multiuser.errors import ConfigError

OUTPUT = "lm_head.weight"

COMPUTED = {"hidden_act": "silu", "use_sliding_window": False, "quantization_config": None}
"""Fields of `config.json` that published models leave at one value."""


def read_config(values: Mapping[str, Any]) -> CausalConfig:
    """The model that a parsed `config.json` describes.

    What is left out has the default of transformers' configuration_qwen2.py.

    Raises:
        ConfigError: a size that is missing or cannot work, or something that is not computed here.
    """
    values = with_rope_parameters(values)
    only(values, COMPUTED)
    hidden, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    if values.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} cannot be split over num_attention_heads {heads}")
    # Published files leave it out, and that is what the original divides by then.
    head_dim = hidden // heads if values.get("head_dim") is None else whole(values, "head_dim")
    vocab_size = whole(values, "vocab_size")
    return CausalConfig(
        family="qwen2",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=whole(values, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=whole(values, "num_key_value_heads"),
        head_dim=head_dim,
        inner_hidden_size=whole(values, "intermediate_size"),
        max_sequence_length=whole(values, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(values, vocab_size),
        rotary_dim=head_dim,
        rope_theta=positive(values, "rope_theta", 10000.0),
        rotary_interleaved=False,
        layernorm_epsilon=positive(values, "rms_norm_eps", 1e-6),
        qkv_bias=True,
        tied=switch(values, "tie_word_embeddings", False),
    )


def shapes(config: CausalConfig) -> dict[str, tuple[int, ...]]:
    """Our parameter's name -> its shape, for every weight of the model."""
    hidden, inner = config.hidden_size, config.inner_hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        found[f"{prefix}input_layernorm.weight"] = (hidden,)
        for linear, rows in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
            found[f"{prefix}self_attn.{linear}.weight"] = (rows, hidden)
            if config.qkv_bias:
                found[f"{prefix}self_attn.{linear}.bias"] = (rows,)
        found[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        found[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        found[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    found["model.norm.weight"] = (hidden,)
    if not config.tied:
        found[OUTPUT] = (config.vocab_size, hidden)
    return found


def placements(config: CausalConfig) -> dict[str, Optional[Placement]]:
    """Name in the checkpoint -> its place, for every weight of the model."""
    places: dict[str, Optional[Placement]] = {name: Placement(name) for name in shapes(config)}
    if config.tied:
        places[OUTPUT] = None
    return places
