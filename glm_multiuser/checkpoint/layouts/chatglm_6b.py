"""ChatGLM-6B in Hugging Face layout (THUDM/chatglm-6b, modeling_chatglm.py) and in MindFormers.

Names differ in the last word only, and MindFormers has ours. All store matrices as [out, in]. The
outputs of `query_key_value` are all heads' queries, then all keys, then all values here, and query,
key, value of the first head, then of the next one, in both of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm_multiuser.checkpoint.layouts.fields import only
from glm_multiuser.checkpoint.placement import Placement
from glm_multiuser.config import ModelConfig

COMPUTED = {"quantization_bit": 0, "quantization_config": None, "pre_seq_len": None}
"""Fields of `config.json` that published models leave at one value."""


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a parsed `config.json` describes.

    Raises:
        ConfigError: a size that is missing or cannot work, or something that is not computed here.
    """
    only(values, COMPUTED)
    return ModelConfig.from_dict(values)


def placements(config: ModelConfig) -> dict[str, Placement]:
    """Name in the checkpoint -> its place, for every weight of the model."""
    places = {
        "transformer.word_embeddings.weight": Placement(
            "transformer.word_embeddings.embedding_table"
        ),
        "transformer.final_layernorm.weight": Placement("transformer.final_layernorm.gamma"),
        "transformer.final_layernorm.bias": Placement("transformer.final_layernorm.beta"),
        "lm_head.weight": Placement("lm_head.weight"),
    }
    for layer in range(config.num_layers):
        prefix = f"transformer.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            places[f"{prefix}{norm}.weight"] = Placement(f"{prefix}{norm}.gamma")
            places[f"{prefix}{norm}.bias"] = Placement(f"{prefix}{norm}.beta")
        for linear in (
            "attention.query_key_value",
            "attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ):
            per_head = linear == "attention.query_key_value"
            weight, bias = f"{prefix}{linear}.weight", f"{prefix}{linear}.bias"
            places[weight] = Placement(weight, per_head=per_head)
            places[bias] = Placement(bias, per_head=per_head)
    return places


def mindformers_placements(config: ModelConfig) -> dict[str, Placement]:
    """The same for MindFormers (mindformers/models/glm/glm.py), whose names are ours."""
    return {place.name: place for place in placements(config).values()}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameter's name -> its shape, for every weight of the model; the same in all layouts."""
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
