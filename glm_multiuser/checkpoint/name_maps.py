"""What ChatGLM-6B calls its tensors in Hugging Face layout, and how ours differ.

Names differ in the last word only. Layouts differ in two ways:

* matrices are stored [in, out] here and [out, in] there (the embedding is a table, not a matrix);
* the outputs of `query_key_value` are all heads' queries, then all keys, then all values here,
  and query, key, value of the first head, then of the next one, there.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

NO_WEIGHT = re.compile(r"\.attention\.rotary_emb\.inv_freq$")
"""Buffers that original checkpoints carry along; the rotary tables are computed instead."""


class Placement(NamedTuple):
    """Where a tensor of a Hugging Face checkpoint goes."""

    name: str
    """Our parameter's name."""
    transposed: bool = False
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
        "lm_head.weight": Placement("lm_head.weight", transposed=True),
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
            places[weight] = Placement(weight, transposed=True, per_head=per_head)
            places[bias] = Placement(bias, per_head=per_head)
    return places


def their_shape(place: Placement, our_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a parameter of ours has in the checkpoint."""
    return our_shape[::-1] if place.transposed else our_shape


def to_our_layout(array: Array, place: Placement, heads: int, dtype: DTypeLike) -> Array:
    """Lays out a checkpoint's tensor as our parameter; copies once, whatever has to change.

    Args:
        array: as in the checkpoint, [out, in] or [out] or the embedding's [vocab, hidden].
        place: what is different here.
        heads: attention heads, for what is grouped by them.
        dtype: of the result.
    """
    view = array
    if place.per_head:
        view = view.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1)
    if place.transposed:
        view = np.moveaxis(view, -1, 0)
    return view.astype(dtype, order="C").reshape(their_shape(place, array.shape))


def to_their_layout(array: Array, place: Placement, heads: int) -> Array:
    """The inverse of `to_our_layout`, with the dtype unchanged."""
    view = array
    if place.per_head:
        view = view.reshape(*array.shape[:-1], 3, heads, -1).swapaxes(-3, -2)
    if place.transposed:
        view = np.moveaxis(view, 0, -1)
    return np.ascontiguousarray(view).reshape(their_shape(place, array.shape))
