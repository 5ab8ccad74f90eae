"""Maps the tensors of a GGUF file to parameters.

Their names are those of `gguf-py/gguf/tensor_mapping.py` in llama.cpp.
"""

from __future__ import annotations

from typing import Optional

from glm_multiuser.checkpoint.gguf import rope
from glm_multiuser.checkpoint.gguf.config import EMBEDDING, OUTPUT, architecture_of
from glm_multiuser.checkpoint.gguf.file import GGUFFile
from glm_multiuser.checkpoint.layouts import decoder
from glm_multiuser.checkpoint.placement import Placement, Places
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import AnyModelConfig, CausalConfig

NORMS = {
    "before": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}
"""Tensor of a layer -> our parameter's name, for each place."""


def gguf_placements(config: AnyModelConfig, file: GGUFFile) -> Places:
    """Returns the placements by name in the file, for every weight.

    Files of the same architecture differ: queries, keys and values are one tensor or three, gate
    and up projection one or two.

    Raises:
        CheckpointError: a family without GGUF files.
    """
    if not isinstance(config, CausalConfig):
        raise CheckpointError(f"family {config.family!r} has no layout in GGUF files")
    permuted = architecture_of(file).permuted
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries = heads * config.head_dim
    keys = queries + kv_heads * config.head_dim
    rows = 2 * keys - queries
    inner = config.inner_hidden_size
    qkv, mlp = "self_attention.query_key_value", "mlp.dense_h_to_4h"
    places: dict[str, Optional[Placement]] = {
        EMBEDDING: Placement(decoder.EMBEDDING),
        "output_norm.weight": Placement(decoder.FINAL_NORM),
        rope.FACTORS: None,
    }
    if not config.tied:
        places[OUTPUT] = Placement(decoder.OUTPUT)
    for layer in range(config.num_layers):
        theirs, ours = f"blk.{layer}.", decoder.layer_prefix(layer)
        linears: dict[str, tuple[Placement, bool]] = {
            "attn_output": (Placement("self_attention.dense"), config.dense_bias),
            "ffn_down": (Placement("mlp.dense_4h_to_h"), config.mlp_bias),
        }
        if f"{theirs}attn_qkv.weight" in file.tensors and not permuted:
            linears["attn_qkv"] = Placement(qkv), config.qkv_bias
        else:
            turned = (heads, kv_heads) if permuted else (0, 0)
            query = Placement(qkv, (0, queries), interleaved_heads=turned[0])
            key = Placement(qkv, (queries, keys), interleaved_heads=turned[1])
            linears["attn_q"] = query, config.qkv_bias
            linears["attn_k"] = key, config.qkv_bias
            linears["attn_v"] = Placement(qkv, (keys, rows)), config.qkv_bias
        if f"{theirs}ffn_gate.weight" in file.tensors:
            linears["ffn_gate"] = Placement(mlp, (0, inner)), config.mlp_bias
            linears["ffn_up"] = Placement(mlp, (inner, 2 * inner)), config.mlp_bias
        else:
            linears["ffn_up"] = Placement(mlp), config.mlp_bias
        for where, norms in NORMS.items():
            if config.norm_position in (where, "both"):
                for name, norm in norms.items():
                    places[f"{theirs}{name}.weight"] = Placement(f"{ours}{norm}.weight")
        if config.query_key_norm:
            norm = f"{ours}self_attention.query_key_norm"
            places[f"{theirs}attn_q_norm.weight"] = Placement(f"{norm}.query_weight")
            places[f"{theirs}attn_k_norm.weight"] = Placement(f"{norm}.key_weight")
        for name, (place, has_bias) in linears.items():
            for word in ("weight", "bias") if has_bias else ("weight",):
                places[f"{theirs}{name}.{word}"] = place._replace(name=f"{ours}{place.name}.{word}")
    return places
