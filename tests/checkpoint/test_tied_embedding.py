"""The output layer of models whose config.json says that it is the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_multiuser import CheckpointError
from tests.checkpoint.folders import (
    CHATGLM2,
    GLM4,
    GLM4_0414,
    LLAMA,
    QWEN2,
    QWEN3,
    Array,
    arrays_of,
    load_folder,
    same,
    write_folder,
    write_json,
)

TIED = {"tie_word_embeddings": True}

of_every_layout = pytest.mark.parametrize(
    ("values", "name"),
    [
        (CHATGLM2, "transformer.output_layer.weight"),
        (GLM4, "lm_head.weight"),
        (GLM4_0414, "lm_head.weight"),
        (LLAMA, "lm_head.weight"),
        (QWEN2, "lm_head.weight"),
        (QWEN3, "lm_head.weight"),
    ],
)


def load(folder: Path, values: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    write_folder(folder, arrays)
    write_json(folder / "config.json", values)
    return load_folder(folder)


def embedding_of(arrays: dict[str, Array]) -> str:
    return next(one for one in arrays if "embed" in one)


@of_every_layout
def test_a_copy_of_the_embedding_is_left_out(
    tmp_path: Path, values: dict[str, Any], name: str
) -> None:
    tied = {**values, **TIED}
    arrays = arrays_of(tied)
    without = load(tmp_path / "without", tied, arrays)
    embedding = arrays[embedding_of(arrays)]
    for dtype in ("float32", "float64"):
        copied = {**arrays, name: embedding.astype(dtype)}
        assert same(load(tmp_path / dtype, tied, copied), without)
    with pytest.raises(CheckpointError, match=rf"lacks {name}, expected with shape \[11, "):
        load(tmp_path / "not_tied", values, arrays)


@of_every_layout
def test_another_output_layer_is_refused(tmp_path: Path, values: dict[str, Any], name: str) -> None:
    """transformers 4 leaves it out, transformers 5 and llama.cpp compute with it."""
    tied = {**values, **TIED}
    arrays = arrays_of(tied)
    embedding = embedding_of(arrays)
    changed = arrays[embedding].copy()
    changed[10, 3] += 1
    for number, other in enumerate((changed, np.ones((12, changed.shape[1]), np.float32))):
        message = rf"{name} in .* differs from {embedding}, and tie_word_embeddings"
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / str(number), tied, {**arrays, name: other})
