"""The parameters of `models/decoder.py`, shared by all causal families."""

from __future__ import annotations

from glm_multiuser.model_config import CausalConfig

EMBEDDING = "transformer.embedding.word_embeddings.weight"
FINAL_NORM = "transformer.encoder.final_layernorm.weight"
OUTPUT = "transformer.output_layer.weight"


def layer_prefix(layer: int) -> str:
    """Returns the name prefix of a layer's parameters."""
    return f"transformer.encoder.layers.{layer}."


def shapes(config: CausalConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by our parameter's name."""
    hidden, inner = config.hidden_size, config.inner_hidden_size
    queries = config.num_attention_heads * config.head_dim
    qkv = queries + 2 * config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    norms: list[str] = []
    if config.norm_position in ("before", "both"):
        norms += ["input_layernorm", "post_attention_layernorm"]
    if config.norm_position in ("after", "both"):
        norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    linears = {
        "self_attention.query_key_value": (qkv, hidden, config.qkv_bias),
        "self_attention.dense": (hidden, queries, config.dense_bias),
        "mlp.dense_h_to_4h": (2 * inner, hidden, config.mlp_bias),
        "mlp.dense_4h_to_h": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for norm in norms:
            found.update({f"{prefix}{norm}.{word}": (hidden,) for word in _norm_words(config)})
        for linear, (outputs, inputs, has_bias) in linears.items():
            found[f"{prefix}{linear}.weight"] = (outputs, inputs)
            if has_bias:
                found[f"{prefix}{linear}.bias"] = (outputs,)
        if config.query_key_norm:
            for word in ("query_weight", "key_weight"):
                found[f"{prefix}self_attention.query_key_norm.{word}"] = (config.head_dim,)
    final = FINAL_NORM.rpartition(".")[0]
    found.update({f"{final}.{word}": (hidden,) for word in _norm_words(config)})
    if not config.tied:
        found[OUTPUT] = (config.vocab_size, hidden)
    return found


def _norm_words(config: CausalConfig) -> tuple[str, ...]:
    return ("weight",) if config.norm == "rms" else ("gamma", "beta")
