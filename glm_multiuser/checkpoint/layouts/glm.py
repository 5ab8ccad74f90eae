"""GLM-4 as transformers stores it: modeling_glm.py there, THUDM/glm-4-9b-chat-hf.

The same model as in `chatglm.py` with queries, keys and values in tensors of their own, which fill
the rows of one parameter here, one behind the other. `gate_up_proj` has the gate's rows first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from glm_multiuser.checkpoint.layouts import chatglm
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

COMPUTED = {"hidden_act": "silu", "quantization_config": None}
"""Fields of `config.json` that published models leave at one value."""


def read_config(values: Mapping[str, Any]) -> CausalConfig:
    """The model that a parsed `config.json` describes.

    What is left out has the default of transformers' configuration_glm.py.

    Raises:
        ConfigError: a size that is missing or cannot work, or something that is not computed here.
    """
    values = with_rope_parameters(values)
    only(values, COMPUTED)
    head_dim, vocab_size = whole(values, "head_dim"), whole(values, "vocab_size")
    return CausalConfig(
        family="chatglm",
        vocab_size=vocab_size,
        hidden_size=whole(values, "hidden_size"),
        num_layers=whole(values, "num_hidden_layers"),
        num_attention_heads=whole(values, "num_attention_heads"),
        num_key_value_heads=whole(values, "num_key_value_heads"),
        head_dim=head_dim,
        inner_hidden_size=whole(values, "intermediate_size"),
        max_sequence_length=whole(values, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(values, vocab_size),
        rotary_dim=int(head_dim * positive(values, "partial_rotary_factor", 0.5)),
        rope_theta=positive(values, "rope_theta", 10000.0),
        rotary_interleaved=True,
        layernorm_epsilon=positive(values, "rms_norm_eps", 1.5625e-07),
        qkv_bias=switch(values, "attention_bias", False),
        tied=switch(values, "tie_word_embeddings", False),
    )


shapes = chatglm.shapes


def placements(config: CausalConfig) -> dict[str, Optional[Placement]]:
    """Name in the checkpoint -> its place, for every weight of the model."""
    queries = config.num_attention_heads * config.head_dim
    keys = queries + config.num_key_value_heads * config.head_dim
    values = keys + config.num_key_value_heads * config.head_dim
    rows = {"q_proj": (0, queries), "k_proj": (queries, keys), "v_proj": (keys, values)}
    places: dict[str, Optional[Placement]] = {
        "model.embed_tokens.weight": Placement(chatglm.EMBEDDING),
        "model.norm.weight": Placement("transformer.encoder.final_layernorm.weight"),
        "lm_head.weight": None if config.tied else Placement(chatglm.OUTPUT),
    }
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"transformer.encoder.layers.{layer}."
        for their_name, our_name in {
            "input_layernorm": "input_layernorm",
            "self_attn.o_proj": "self_attention.dense",
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        }.items():
            places[f"{theirs}{their_name}.weight"] = Placement(f"{ours}{our_name}.weight")
        for word in ("weight", "bias") if config.qkv_bias else ("weight",):
            for linear, part in rows.items():
                place = Placement(f"{ours}self_attention.query_key_value.{word}", part)
                places[f"{theirs}self_attn.{linear}.{word}"] = place
    return places
