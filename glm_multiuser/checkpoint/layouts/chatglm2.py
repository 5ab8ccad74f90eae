"""ChatGLM2, ChatGLM3 and GLM-4 as THUDM published them, and in MindFormers.

The layout of modeling_chatglm.py in THUDM/chatglm2-6b, THUDM/chatglm3-6b and THUDM/glm-4-9b, with
the same names as our parameters. `query_key_value` has the rows of all query heads, then keys, then
values; `dense_h_to_4h` those of the gate, then of the up projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from glm_multiuser.checkpoint.layouts import Layout, decoder
from glm_multiuser.checkpoint.layouts.fields import eos_token_ids, only, positive, switch, whole
from glm_multiuser.checkpoint.placement import Placement
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import CausalConfig

COMPUTED = {
    "multi_query_attention": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "interleaved_qkv": False,
    "quantization_bit": 0,
    "quantization_config": None,
    "pre_seq_len": None,
    "vision_config": None,
}
"""Fields of `config.json` with the same value in all published models."""


def read_config(values: Mapping[str, Any]) -> CausalConfig:
    """See `Layout`; missing fields have the defaults of configuration_chatglm.py."""
    # The published code's default is false, and its rows of `query_key_value` are then per head.
    only({"multi_query_attention": False, **values}, COMPUTED)
    rope_ratio = positive(values, "rope_ratio", 1.0)
    # The only published model of this layout that divides positions by it; chatglm3-6b-32k, GLM-4
    # and all others multiply the base of the frequencies by it.
    if rope_ratio != 1 and "chatglm2" in str(values.get("_name_or_path")).lower():
        raise ConfigError(f"rope_ratio is {rope_ratio} in a ChatGLM2; only 1 is computed there")
    heads, head_dim = whole(values, "num_attention_heads"), whole(values, "kv_channels")
    vocab_size = whole(values, "padded_vocab_size")
    return CausalConfig(
        family="chatglm2",
        vocab_size=vocab_size,
        hidden_size=whole(values, "hidden_size"),
        num_layers=whole(values, "num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=whole(values, "multi_query_group_num"),
        head_dim=head_dim,
        inner_hidden_size=whole(values, "ffn_hidden_size"),
        max_sequence_length=whole(values, "seq_length"),
        eos_token_ids=eos_token_ids(values, vocab_size),
        rotary_dim=head_dim // 2,
        rope_theta=10000.0 * rope_ratio,
        rotary_interleaved=True,
        layernorm_epsilon=positive(values, "layernorm_epsilon", 1e-5),
        qkv_bias=switch(values, "add_qkv_bias"),
        tied=switch(values, "tie_word_embeddings"),
    )


def placements(config: CausalConfig) -> dict[str, Optional[Placement]]:
    """Returns the placements by name in the checkpoint, for every weight."""
    places: dict[str, Optional[Placement]] = {
        name: Placement(name) for name in decoder.shapes(config)
    }
    if config.tied:
        places[decoder.OUTPUT] = None
    return places


def mindformers_placements(config: CausalConfig) -> dict[str, Optional[Placement]]:
    """Returns those of MindFormers 1.3.2 (mindformers/models/glm2/convert_weight.py)."""
    places = placements(config)
    places["transformer.embedding.embedding_weight"] = places.pop(decoder.EMBEDDING)
    return places


LAYOUT = Layout(
    ("chatglm",), ("ChatGLMModel", "ChatGLMForConditionalGeneration"), read_config, placements
)
