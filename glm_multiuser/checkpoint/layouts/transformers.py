"""Layouts of the causal families in transformers.

Tensor names are those of modeling_llama.py. Queries, keys and values are separate tensors, whose
rows are concatenated in one parameter here; so are gate and up projection, unless they are one
tensor, `gate_up_proj`, with the gate's rows first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable, Optional

from glm_multiuser.checkpoint.layouts import Layout, decoder
from glm_multiuser.checkpoint.layouts.fields import eos_token_ids, only, positive, switch, whole
from glm_multiuser.checkpoint.layouts.rope import rope_fields
from glm_multiuser.checkpoint.placement import Placement, Places
from glm_multiuser.checkpoint.quantised_folder import read_quantisation
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import CausalConfig

NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of a layer; our names are the same."""


def layout(
    family: str,
    model_types: tuple[str, ...],
    architectures: tuple[str, ...],
    computed: Mapping[str, Any],
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {},
    defaults: Optional[Mapping[str, Any]] = None,
    norms: Sequence[str] = NORMS,
    gate_up: bool = False,
) -> Layout:
    """Builds a layout of transformers.

    Args:
        computed: the only supported value of fields of `config.json`.
        fields: a parsed `config.json` -> fields of `CausalConfig` besides those of `read`.
        defaults: the family's own defaults for fields of `config.json`.
        norms: norms of a layer.
        gate_up: whether gate and up projection are one tensor.
    """

    def read_config(values: Mapping[str, Any]) -> CausalConfig:
        values = {**(defaults or {}), **values}
        only(values, {"hidden_act": "silu", "is_causal": True, **computed})
        read_quantisation(values)
        found = {**read(values), **fields(values)}
        if "partial_rotary_factor" not in (defaults or {}):
            _check_whole_heads(found["rotary_dim"], found["head_dim"])
        return CausalConfig(family=family, **found)

    placements_of = partial(placements, norms=norms, gate_up=gate_up)
    return Layout(model_types, architectures, read_config, placements_of)


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of `CausalConfig` that all families share from a parsed `config.json`.

    Raises:
        ConfigError: a missing or invalid size, or an unsupported feature.
    """
    hidden, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    if values.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} cannot be split over num_attention_heads {heads}")
    # Most files omit it; this is the original's default.
    head_dim = whole(values, "head_dim", hidden // heads)
    vocab_size = whole(values, "vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": whole(values, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(values, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "inner_hidden_size": whole(values, "intermediate_size"),
        "eos_token_ids": eos_token_ids(values, vocab_size),
        "layernorm_epsilon": positive(values, "rms_norm_eps", 1e-6),
        "qkv_bias": switch(values, "attention_bias"),
        "tied": switch(values, "tie_word_embeddings"),
        **rope_fields(values, head_dim),
    }


def _check_whole_heads(rotary_dim: int, head_dim: int) -> None:
    """Rejects partial rotation, which transformers 4 does not support for most families; 5 rotates
    whole heads anyway."""
    if rotary_dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor is {rotary_dim / head_dim:g}; only 1 is computed here"
        )


def placements(config: CausalConfig, norms: Sequence[str], gate_up: bool) -> Places:
    """Returns the placements by name in the checkpoint, for every weight."""
    queries = config.num_attention_heads * config.head_dim
    keys = queries + config.num_key_value_heads * config.head_dim
    rows = 2 * keys - queries
    inner = config.inner_hidden_size
    qkv, mlp = "self_attention.query_key_value", "mlp.dense_h_to_4h"
    linears: list[tuple[str, Placement, bool]] = [
        ("self_attn.q_proj", Placement(qkv, (0, queries)), config.qkv_bias),
        ("self_attn.k_proj", Placement(qkv, (queries, keys)), config.qkv_bias),
        ("self_attn.v_proj", Placement(qkv, (keys, rows)), config.qkv_bias),
        ("self_attn.o_proj", Placement("self_attention.dense"), config.dense_bias),
        ("mlp.down_proj", Placement("mlp.dense_4h_to_h"), config.mlp_bias),
    ]
    if gate_up:
        linears.append(("mlp.gate_up_proj", Placement(mlp), config.mlp_bias))
    else:
        linears.append(("mlp.gate_proj", Placement(mlp, (0, inner)), config.mlp_bias))
        linears.append(("mlp.up_proj", Placement(mlp, (inner, 2 * inner)), config.mlp_bias))
    places: dict[str, Optional[Placement]] = {
        "model.embed_tokens.weight": Placement(decoder.EMBEDDING),
        "model.norm.weight": Placement(decoder.FINAL_NORM),
        "lm_head.weight": None if config.tied else Placement(decoder.OUTPUT),
    }
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", decoder.layer_prefix(layer)
        for norm in norms:
            places[f"{theirs}{norm}.weight"] = Placement(f"{ours}{norm}.weight")
        if config.query_key_norm:
            norm = f"{ours}self_attention.query_key_norm"
            places[f"{theirs}self_attn.q_norm.weight"] = Placement(f"{norm}.query_weight")
            places[f"{theirs}self_attn.k_norm.weight"] = Placement(f"{norm}.key_weight")
        for their_linear, place, has_bias in linears:
            for word in ("weight", "bias") if has_bias else ("weight",):
                ours_named = place._replace(name=f"{ours}{place.name}.{word}")
                places[f"{theirs}{their_linear}.{word}"] = ours_named
    return places


GLM4_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}
"""Half of each head is rotated, in pairs of neighbours."""

GLM4 = layout(
    "chatglm2",
    ("glm",),
    ("GlmForCausalLM",),
    computed={},
    fields=lambda values: {"rotary_interleaved": True},
    defaults=GLM4_DEFAULTS,
    gate_up=True,
)
"""modeling_glm.py, THUDM/glm-4-9b-chat-hf: the same model as in `chatglm2.py`."""

GLM4_0414 = layout(
    "glm4_0414",
    ("glm4",),
    ("Glm4ForCausalLM",),
    computed={},
    fields=lambda values: {"rotary_interleaved": True, "norm_position": "both"},
    defaults=GLM4_DEFAULTS,
    norms=(*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    gate_up=True,
)
"""modeling_glm4.py, THUDM/GLM-4-9B-0414: as GLM-4, with norms before attention and MLP and
after them, before the residual sums."""


def llama_biases(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dense_bias": switch(values, "attention_bias"),
        "mlp_bias": switch(values, "mlp_bias"),
    }


llama_layout = partial(layout, "llama", computed={"sliding_window": None}, fields=llama_biases)

LLAMA = llama_layout(("llama",), ("LlamaForCausalLM",))
"""modeling_llama.py: Llama 2 and 3, SmolLM2, TinyLlama."""

MISTRAL = llama_layout(
    ("mistral",),
    ("MistralForCausalLM",),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
"""modeling_mistral.py, without a sliding window, which is the default if the field is missing."""

QWEN2 = layout(
    "qwen2",
    ("qwen2",),
    ("Qwen2ForCausalLM",),
    computed={"use_sliding_window": False},
    fields=lambda values: {"qkv_bias": True},
)
"""modeling_qwen2.py: Qwen2 and Qwen2.5."""

QWEN3 = layout(
    "qwen3",
    ("qwen3",),
    ("Qwen3ForCausalLM",),
    computed={"use_sliding_window": False},
    fields=lambda values: {
        "query_key_norm": True,
        "dense_bias": switch(values, "attention_bias"),
    },
    defaults={"head_dim": 128},
)
"""modeling_qwen3.py; every query and key head is normalised separately before rotation."""
