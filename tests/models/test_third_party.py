"""One layer of each ChatGLM that another project computed with the original code.

It kept hidden states, not logits. A unit matrix in the place of the head returns them, so here the
vocabulary is as large as the hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.weights import load_weights
from tests.golden_data import golden_folder
from tests.models.driven_model import DrivenModel
from tests.models.golden_cases import worst
from tests.models.native_driver import NativeDriver
from tests.models.portable_driver import PortableDriver

MLP = "transformer.encoder.layers.0.mlp"
TOLERANCE = 1e-5
SEQ_LENGTH = 16
EPSILONS = {"glm2": 1e-5, "glm3": 1e-5, "glm4": 1.5625e-07}
"""Of the norms, as the published `config.json` has them."""

Asked = Callable[[Sequence[int], Sequence[int]], list[Any]]
"""A prompt, and what its user says next instead of the model's own tokens -> a row for the prompt
and one for each of these tokens."""


def arrays_of(name: str) -> dict[str, Any]:
    with np.load(golden_folder("third_party_chatglm_cpp", name) / name) as file:
        return dict(file)


def save_weights(folder: Path, arrays: dict[str, Any], embedding: str, head: str) -> int:
    """-> the hidden size, which is the vocabulary's, too."""
    weights = {name: values for name, values in arrays.items() if name.startswith("transformer.")}
    rows, hidden = weights[embedding].shape
    padding = np.zeros((hidden - rows, hidden), np.float32)
    weights[embedding] = np.concatenate((weights[embedding], padding))
    weights[head] = np.eye(hidden, dtype=np.float32)
    save_file(weights, folder / "model.safetensors")
    return int(hidden)


def test_chatglm_6b(tmp_path: Path) -> None:
    arrays = arrays_of("glm_model.npz")
    hidden = save_weights(tmp_path, arrays, "transformer.word_embeddings.weight", "lm_head.weight")
    config = ModelConfig(
        vocab_size=hidden,
        hidden_size=hidden,
        num_layers=1,
        num_attention_heads=int(arrays["heads"]),
        inner_hidden_size=arrays["transformer.layers.0.mlp.dense_h_to_4h.bias"].size,
        gmask_token_id=1,
        bos_token_id=2,
        deepnorm_layers=28,
    )
    layout = CellLayout.plan(3, SEQ_LENGTH, users_per_cell=2)
    model = DrivenModel(config, load_weights(tmp_path, config), layout)
    stream = model.start(arrays["x1"][0].tolist())
    assert (stream.positions.ids(0, 3) == arrays["position_ids_1"]).all()
    for last in range(3):
        assert worst(model.prefill(2, stream, 3, last).logits[0], arrays["y1"][last]) <= TOLERANCE
    for step in (2, 3):
        stream.token_ids += arrays[f"x{step}"][0].tolist()
        assert worst(model.decode({2: stream}, users=[2]).logits, arrays[f"y{step}"]) <= TOLERANCE


def native(folder: Path) -> Asked:
    driver = NativeDriver.of_folder(folder, users=3, seq_length=SEQ_LENGTH)

    def ask(prompt: Sequence[int], following: Sequence[int]) -> list[Any]:
        request = driver.request(prompt)
        rows = [driver.step({1: request})[1]]
        for token_id in following:
            request.output_token_ids[-1] = token_id
            rows.append(driver.step({1: request})[1])
        return rows

    return ask


def portable(folder: Path) -> Asked:
    driver = PortableDriver(folder, (SEQ_LENGTH,), seq_length=SEQ_LENGTH)

    def ask(prompt: Sequence[int], following: Sequence[int]) -> list[Any]:
        request = driver.request(prompt)
        rows = [driver.prefill(1, request)]
        for token_id in following:
            request.output_token_ids[-1] = token_id
            rows.append(driver.decode({1: request})[0])
        return rows

    return ask


@pytest.mark.parametrize("open_model", [native, pytest.param(portable, marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", EPSILONS)
def test_later_families(name: str, open_model: Callable[[Path], Asked], tmp_path: Path) -> None:
    arrays = arrays_of(f"{name}_model.npz")
    hidden = save_weights(
        tmp_path,
        arrays,
        "transformer.embedding.word_embeddings.weight",
        "transformer.output_layer.weight",
    )
    config = {
        "model_type": "chatglm",
        "padded_vocab_size": hidden,
        "hidden_size": hidden,
        "num_layers": 1,
        "num_attention_heads": int(arrays["heads"]),
        "kv_channels": hidden // int(arrays["heads"]),
        "multi_query_attention": True,
        "multi_query_group_num": int(arrays["kv_groups"]),
        "ffn_hidden_size": arrays[f"{MLP}.dense_4h_to_h.weight"].shape[1],
        "rope_ratio": float(arrays["rope_theta"]) / 10000,
        "seq_length": SEQ_LENGTH,
        "layernorm_epsilon": EPSILONS[name],
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ask = open_model(tmp_path)
    prompt, *following = (arrays[f"x{number}"][0].tolist() for number in (1, 2, 3))
    for length in (1, 2):
        (row,) = ask(prompt[:length], [])
        assert worst(row, arrays["y1"][length - 1]) <= TOLERANCE, length
    rows = ask(prompt, [token_id for step in following for token_id in step])
    expected = [arrays["y1"][-1], arrays["y2"][0], arrays["y3"][0]]
    assert [worst(row, wanted) <= TOLERANCE for row, wanted in zip(rows, expected)] == [True] * 3
