"""What ChatGLM-6B calls its tensors in Hugging Face layout and in MindFormers, and how ours differ.

Names differ in the last word only, and MindFormers has ours. All store matrices as [out, in]. The
outputs of `query_key_value` are all heads' queries, then all keys, then all values here, and query,
key, value of the first head, then of the next one, there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from glm_multiuser.checkpoint.stored_tensor import Array
from glm_multiuser.config import ModelConfig

NO_WEIGHT = re.compile(r"\.attention\.rotary_emb\.inv_freq$")
"""Buffers that original checkpoints carry along; the rotary tables are computed instead."""

NO_WEIGHT_OF_MINDFORMERS = re.compile(
    r"""
    \.attention\.rotary_emb\.inv_freq$     # its converter takes them over
    | (^|\.)\w*_past(\.|$)                 # caches, which are Parameters in MindFormers
    | ^\w+\.(transformer|lm_head)\.         # what an optimizer keeps for each weight
    | ^( global_step | epoch_num | step_num | global_batch_size | (current_)?learning_rate\w*
       | beta[12]_power | loss_scale | scale_sense | scale_window\w* | list_index
       | current_iterator_step | last_overflow_iterator_step | afactor_step )$
    """,
    re.VERBOSE,
)
"""What a `.ckpt` may hold besides the weights, and what a model answers the same without.

A checkpoint from fine-tuning has the state of the optimizer and of the training loop, and all the
weights; nobody needs to strip it before it can be used. Other names are refused: those of LoRA or
p-tuning, for example, change what the model answers.
"""


class Placement(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    name: str
    """Our parameter's name."""
    per_head: bool = False
    """Its outputs are grouped by head there and by query, key, value here."""


def glm_placements(num_layers: int) -> dict[str, Placement]:
    """Name in a ChatGLM-6B checkpoint -> its place, for every weight of the model."""
    places = {
        "transformer.word_embeddings.weight": Placement(
            "transformer.word_embeddings.embedding_table"
        ),
        "transformer.final_layernorm.weight": Placement("transformer.final_layernorm.gamma"),
        "transformer.final_layernorm.bias": Placement("transformer.final_layernorm.beta"),
        "lm_head.weight": Placement("lm_head.weight"),
    }
    for layer in range(num_layers):
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


def mindformers_placements(num_layers: int) -> dict[str, Placement]:
    """The same for MindFormers, whose names are ours."""
    return {place.name: place for place in glm_placements(num_layers).values()}


def glm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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
    shapes = {}
    for name in mindformers_placements(config.num_layers):
        module, last_word = name.split(".")[-2:]
        size = sizes.get(module, (hidden, hidden))  # else a norm
        is_matrix = last_word in ("weight", "embedding_table")
        shapes[name] = size if is_matrix else size[:1]
    return shapes


def to_our_layout(array: Array, place: Placement, heads: int, dtype: DTypeLike) -> Array:
    """Lays out a checkpoint's tensor as our parameter; copies once, whatever has to change.

    Args:
        array: as in the checkpoint, [out, in] or [out] or the embedding's [vocab, hidden].
        place: what is different here.
        heads: attention heads, for what is grouped by them.
        dtype: of the result.
    """
    return _regrouped(array, place, (heads, 3)).astype(dtype, order="C").reshape(array.shape)


def to_their_layout(array: Array, place: Placement, heads: int) -> Array:
    """The inverse of `to_our_layout`, with the dtype unchanged."""
    return np.ascontiguousarray(_regrouped(array, place, (3, heads))).reshape(array.shape)


def _regrouped(array: Array, place: Placement, groups: tuple[int, int]) -> Array:
    """A view of `array` whose outputs, in `groups` of groups, have the outer and the inner one
    exchanged."""
    return array.reshape(*groups, -1, *array.shape[1:]).swapaxes(0, 1) if place.per_head else array
