"""ChatGLM-6B in Hugging Face layout (THUDM/chatglm-6b, modeling_chatglm.py) and in MindFormers.

Names differ only in the last word, and MindFormers' are ours. All store matrices as [out, in]. Our
`query_key_value` has the queries of all heads, then all keys, then all values; both of theirs have
query, key, value per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_multiuser.checkpoint.layouts import Layout
from glm_multiuser.checkpoint.layouts.fields import only
from glm_multiuser.checkpoint.placement import Placement
from glm_multiuser.model_config import ChatGLM6BConfig

COMPUTED = {"quantization_bit": 0, "quantization_config": None, "pre_seq_len": None}
"""Fields of `config.json` with the same value in all published models."""

QUERY_KEY_VALUE = "attention.query_key_value"
LINEARS = (QUERY_KEY_VALUE, "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
"""Of a layer."""


def read_config(values: Mapping[str, Any]) -> ChatGLM6BConfig:
    """See `Layout`."""
    only(values, COMPUTED)
    return ChatGLM6BConfig.from_dict(values)


def placements(config: ChatGLM6BConfig) -> dict[str, Placement]:
    """Returns the placements by name in the checkpoint, for every weight."""
    embedding, norm = "transformer.word_embeddings", "transformer.final_layernorm"
    places = {
        f"{embedding}.weight": Placement(f"{embedding}.embedding_table"),
        f"{norm}.weight": Placement(f"{norm}.gamma"),
        f"{norm}.bias": Placement(f"{norm}.beta"),
        "lm_head.weight": Placement("lm_head.weight"),
    }
    for layer in range(config.num_layers):
        prefix = f"transformer.layers.{layer}."
        for norm in (f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm"):
            places[f"{norm}.weight"] = Placement(f"{norm}.gamma")
            places[f"{norm}.bias"] = Placement(f"{norm}.beta")
        for linear in LINEARS:
            for name in (f"{prefix}{linear}.weight", f"{prefix}{linear}.bias"):
                places[name] = Placement(name, per_head=linear == QUERY_KEY_VALUE)
    return places


def mindformers_placements(config: ChatGLM6BConfig) -> dict[str, Placement]:
    """Returns those of MindFormers (mindformers/models/glm/glm.py), whose names are ours."""
    return {place.name: place for place in placements(config).values()}


def shapes(config: ChatGLM6BConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by our parameter's name; the same in all layouts."""
    hidden, inner, vocab = config.hidden_size, config.inner_hidden_size, config.vocab_size
    sizes: dict[str, tuple[int, ...]] = {
        "query_key_value": (3 * hidden, hidden),
        "dense": (hidden, hidden),
        "dense_h_to_4h": (inner, hidden),
        "dense_4h_to_h": (hidden, inner),
        "lm_head": (vocab, hidden),
        "word_embeddings": (vocab, hidden),
    }
    found = {}
    for name in mindformers_placements(config):
        module, last_word = name.split(".")[-2:]
        size = sizes.get(module, (hidden, hidden))  # else a norm
        is_matrix = last_word in ("weight", "embedding_table")
        found[name] = size if is_matrix else size[:1]
    return found


LAYOUT = Layout((), (), read_config, placements)
"""Without a model_type, which ChatGLM2 and later share; `layout_of_config` tells them apart."""
