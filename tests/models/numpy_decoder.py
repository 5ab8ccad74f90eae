"""The causal models once more, from their formulas, in float64 and without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from glm_multiuser.model_config import CausalConfig

Array = np.ndarray


def logits_of(
    config: CausalConfig, weights: Mapping[str, Array], token_ids: Sequence[int]
) -> Array:
    """Logits at every position, [tokens, vocab_size]; of `rope_scaling` linear only."""

    def norm(x: Array, name: str) -> Array:
        if config.norm == "rms":
            return rms_norm(x, weights[f"{name}.weight"], config.layernorm_epsilon)
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layernorm_epsilon)
        return y * weights[f"{name}.gamma"] + weights[f"{name}.beta"]

    def linear(x: Array, name: str, has_bias: bool) -> Array:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if has_bias else y

    def attention(x: Array, name: str) -> Array:
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        x = linear(x, f"{name}.query_key_value", config.qkv_bias).reshape(len(x), -1, size)
        query, key, value = np.split(x, [heads, heads + kv_heads], axis=1)
        if config.query_key_norm:
            query, key = (
                rms_norm(
                    one,
                    weights[f"{name}.query_key_norm.{word}_weight"],
                    config.layernorm_epsilon,
                )
                for one, word in ((query, "query"), (key, "key"))
            )
        query, key = rotated(config, query), rotated(config, key)
        key, value = (one.repeat(heads // kv_heads, axis=1) for one in (key, value))
        scores = np.einsum("ihd,jhd->hij", query, key) / np.sqrt(size)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        seen = np.exp(scores - scores.max(-1, keepdims=True))
        seen /= seen.sum(-1, keepdims=True)
        context = np.einsum("hij,jhd->ihd", seen, value).reshape(len(x), -1)
        return linear(context, f"{name}.dense", config.dense_bias)

    def mlp(x: Array, name: str) -> Array:
        gate, up = np.split(linear(x, f"{name}.dense_h_to_4h", config.mlp_bias), 2, axis=1)
        return linear(gate / (1 + np.exp(-gate)) * up, f"{name}.dense_4h_to_h", config.mlp_bias)

    weights = {name: one.astype(np.float64) for name, one in weights.items()}
    embedding = weights["transformer.embedding.word_embeddings.weight"]
    x = embedding[list(token_ids)]
    for number in range(config.num_layers):
        layer = f"transformer.encoder.layers.{number}"
        for part, name, before, after in (
            (attention, "self_attention", "input_layernorm", "post_self_attn_layernorm"),
            (mlp, "mlp", "post_attention_layernorm", "post_mlp_layernorm"),
        ):
            y = x if config.norm_position == "after" else norm(x, f"{layer}.{before}")
            y = part(y, f"{layer}.{name}")
            x = x + (y if config.norm_position == "before" else norm(y, f"{layer}.{after}"))
    x = norm(x, "transformer.encoder.final_layernorm")
    return x @ (embedding if config.tied else weights["transformer.output_layer.weight"]).T


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    y: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight
    return y


def rotated(config: CausalConfig, x: Array) -> Array:
    """`x` [tokens, heads, head_dim]; each pair of numbers is a complex one that turns."""
    size = config.rotary_dim
    exponents = np.arange(size // 2) * 2 / size
    factor = config.rope_scaling.factor if config.rope_scaling else 1.0
    angles = np.arange(len(x))[:, None] / config.rope_theta**exponents / factor
    first, second = slice(0, size // 2), slice(size // 2, size)
    if config.rotary_interleaved:
        first, second = slice(0, size, 2), slice(1, size, 2)
    turned = (x[:, :, first] + 1j * x[:, :, second]) * np.exp(1j * angles)[:, None]
    y = x.copy()
    y[:, :, first], y[:, :, second] = turned.real, turned.imag
    return y
