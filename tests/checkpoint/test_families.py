"""Every published layout: what its config.json means, and where its tensors go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from glm_multiuser.checkpoint import read_model_config, read_tensors, write_huggingface
from glm_multiuser.checkpoint.layouts import parameter_shapes
from glm_multiuser.config import CausalConfig, ModelConfig
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import (
    CHATGLM,
    CONFIG,
    GLM,
    MODEL,
    QWEN2,
    Array,
    arrays_of,
    load_folder,
    same,
    write_folder,
    write_json,
    write_shards,
)
from tests.golden_data import golden_folder

LAYER = "transformer.encoder.layers.1."
FAMILIES = [CONFIG, CHATGLM, GLM, QWEN2, {**QWEN2, "tie_word_embeddings": True}]
NAMES = ["chatglm-6b", "chatglm", "glm", "qwen2", "qwen2-tied"]


def folder_of(
    folder: Path, values: dict[str, Any], arrays: Optional[dict[str, Array]] = None
) -> Path:
    write_folder(folder, arrays_of(values) if arrays is None else arrays)
    write_json(folder / "config.json", values)
    return folder


def config_of(folder: Path, values: dict[str, Any]) -> Any:
    write_json(folder / "config.json", values)
    return read_model_config(folder)


# config.json


def test_configs_of_the_published_layouts(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 11,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "inner_hidden_size": 6,
        "max_sequence_length": 64,
        "eos_token_ids": (2,),
    }
    chatglm = CausalConfig("chatglm", hidden_size=8, rotary_dim=2, rotary_interleaved=True, **shape)
    qwen2 = CausalConfig("qwen2", hidden_size=16, rotary_dim=4, layernorm_epsilon=1e-6, **shape)
    assert config_of(tmp_path, CONFIG) == MODEL
    assert config_of(tmp_path, CHATGLM) == config_of(tmp_path, GLM) == chatglm
    assert config_of(tmp_path, QWEN2) == qwen2


def test_published_sizes_of_chatglm3(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**CHATGLM, "rope_ratio": 50, "eos_token_id": [3, 4]})
    assert config.rope_theta == 500000.0
    assert config.eos_token_ids == (3, 4)
    every_head = config_of(tmp_path, {**CHATGLM, "multi_query_attention": False})
    assert every_head.num_key_value_heads == 4
    assert not config_of(tmp_path, {**CHATGLM, "add_qkv_bias": False}).qkv_bias


@pytest.mark.parametrize("values", [GLM, QWEN2])
def test_rope_parameters_of_transformers_5(tmp_path: Path, values: dict[str, Any]) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6}
    found = config_of(tmp_path, {**values, "rope_parameters": rope})
    assert found == config_of(tmp_path, {**values, "rope_theta": 5e6})
    assert found.rope_theta == 5e6


@pytest.mark.parametrize("values", FAMILIES, ids=NAMES)
def test_an_architecture_without_model_type(tmp_path: Path, values: dict[str, Any]) -> None:
    expected = config_of(tmp_path, values)
    without = {name: value for name, value in values.items() if name != "model_type"}
    assert config_of(tmp_path, without) == expected


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (CHATGLM, {"rmsnorm": False}, "rmsnorm is False; only true is computed here"),
        (CHATGLM, {"post_layer_norm": False}, "post_layer_norm is False"),
        (CHATGLM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_conn"),
        (CHATGLM, {"add_bias_linear": True}, "add_bias_linear is True"),
        (CHATGLM, {"interleaved_qkv": True}, "interleaved_qkv is True"),
        (CHATGLM, {"pre_seq_len": 128}, "pre_seq_len is 128; only null is computed here"),
        (CHATGLM, {"quantization_bit": 4}, "quantization_bit is 4; only 0 is computed here"),
        (CHATGLM, {"vision_config": {"x": 1}}, "vision_config is"),
        (CHATGLM, {"rope_ratio": "2"}, "rope_ratio is '2'; it must be a number above 0"),
        (CHATGLM, {"rope_ratio": 0}, "rope_ratio is 0; it must be a number above 0"),
        (
            CHATGLM,
            {"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k"},
            "rope_ratio is 16.0 in a ChatGLM2; only 1",
        ),
        (CHATGLM, {"add_qkv_bias": 1}, "add_qkv_bias is 1; it must be true or false"),
        (CHATGLM, {"multi_query_group_num": 3}, "4 cannot be shared out over .* 3"),
        (CHATGLM, {"eos_token_id": 11}, "eos_token_id is 11; .* below the vocabulary's 11"),
        (CHATGLM, {"eos_token_id": [2, "3"]}, r"eos_token_id is \[2, '3'\]"),
        (GLM, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only \"silu\" is computed here"),
        (GLM, {"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        (GLM, {"partial_rotary_factor": 0.8}, "rotary_dim is 3; it must be even"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is True; only false"),
        (QWEN2, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters is .*'linear'"),
        (QWEN2, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        (QWEN2, {"num_attention_heads": 3}, "hidden_size 16 cannot be split over .* 3"),
        (QWEN2, {"vocab_size": True}, "vocab_size is True; it must be a whole number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        config_of(tmp_path, {**values, **changes})


@pytest.mark.parametrize("values", FAMILIES, ids=NAMES)
def test_every_size_is_needed(tmp_path: Path, values: dict[str, Any]) -> None:
    optional = {"eos_token_id"} if values is CONFIG else {"multi_query_group_num"}
    sizes = {name for name, value in values.items() if type(value) is int} - optional
    assert len(sizes) >= 5
    for name in sizes:
        with pytest.raises(CheckpointError, match=f"{name} is missing|lacks .*{name}"):
            config_of(tmp_path, {key: one for key, one in values.items() if key != name})


# Weights


@pytest.mark.parametrize("write", [write_folder, write_shards])
@pytest.mark.parametrize("values", FAMILIES[1:], ids=NAMES[1:])
def test_names_and_values(tmp_path: Path, values: dict[str, Any], write: Any) -> None:
    arrays = arrays_of(values)
    write(tmp_path, arrays)
    write_json(tmp_path / "config.json", values)
    loaded = load_folder(tmp_path)
    if values is not GLM:
        assert same(loaded, arrays)
        return
    for ours, theirs in {
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        f"{LAYER}input_layernorm": "model.layers.1.input_layernorm",
        f"{LAYER}self_attention.dense": "model.layers.1.self_attn.o_proj",
        f"{LAYER}post_attention_layernorm": "model.layers.1.post_attention_layernorm",
        f"{LAYER}mlp.dense_h_to_4h": "model.layers.1.mlp.gate_up_proj",
        f"{LAYER}mlp.dense_4h_to_h": "model.layers.1.mlp.down_proj",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
    }.items():
        np.testing.assert_array_equal(loaded[f"{ours}.weight"], arrays[f"{theirs}.weight"])
    for word in ("weight", "bias"):
        parts = [arrays[f"model.layers.1.self_attn.{one}_proj.{word}"] for one in "qkv"]
        joined = loaded[f"{LAYER}self_attention.query_key_value.{word}"]
        np.testing.assert_array_equal(joined, np.concatenate(parts))


def test_parameters_of_the_model_that_reads_them(tmp_path: Path) -> None:
    """Written down without the library's own tables."""
    shapes = parameter_shapes(config_of(tmp_path, CHATGLM))
    assert len(shapes) == 3 + 2 * 7
    assert shapes["transformer.embedding.word_embeddings.weight"] == (11, 8)
    assert shapes[f"{LAYER}self_attention.query_key_value.weight"] == ((4 + 2 + 2) * 4, 8)
    assert shapes[f"{LAYER}self_attention.query_key_value.bias"] == (32,)
    assert shapes[f"{LAYER}self_attention.dense.weight"] == (8, 16)
    assert shapes[f"{LAYER}mlp.dense_h_to_4h.weight"] == (12, 8)
    assert shapes[f"{LAYER}mlp.dense_4h_to_h.weight"] == (8, 6)
    assert shapes["transformer.output_layer.weight"] == (11, 8)
    shapes = parameter_shapes(config_of(tmp_path, {**QWEN2, "tie_word_embeddings": True}))
    assert len(shapes) == 2 + 2 * 12
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (8, 16)
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (CHATGLM, "transformer.output_layer.weight"),
        (GLM, "lm_head.weight"),
        (QWEN2, "lm_head.weight"),
    ],
)
def test_output_layer_of_a_tied_model(tmp_path: Path, values: dict[str, Any], name: str) -> None:
    tied = {**values, "tie_word_embeddings": True}
    without = load_folder(folder_of(tmp_path / "without", tied))
    stored = {**arrays_of(tied), name: np.ones((11, values["hidden_size"]), np.float32)}
    assert same(load_folder(folder_of(tmp_path / "with", tied, stored)), without)
    del stored[name]
    with pytest.raises(CheckpointError, match=rf"lacks {name}, expected with shape \[11, "):
        load_folder(folder_of(tmp_path / "not_tied", values, stored))


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    for number, (values, name) in enumerate(
        [
            (CHATGLM, "transformer.rotary_pos_emb.inv_freq"),
            (QWEN2, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ]
    ):
        arrays = {**arrays_of(values), name: np.ones(1, np.float32)}
        load_folder(folder_of(tmp_path / str(number), values, arrays))


@pytest.mark.parametrize("values", FAMILIES, ids=NAMES)
def test_written_folder_is_read_back(tmp_path: Path, values: dict[str, Any]) -> None:
    loaded = load_folder(folder_of(tmp_path / "old", values))
    write_huggingface(tmp_path / "new", values, loaded)
    assert same(dict(read_tensors(tmp_path / "new")), dict(read_tensors(tmp_path / "old")))
    assert same(load_folder(tmp_path / "new"), loaded)


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, values in enumerate(FAMILIES):
        whole = load_folder(folder_of(tmp_path / str(number), values), "float16")
        with monkeypatch.context() as patch:
            patch.setattr("glm_multiuser.checkpoint.placement.BLOCK_BYTES", 100)
            assert same(load_folder(tmp_path / str(number), "float16"), whole)


# What the original code wrote


def test_both_layouts_of_glm4_are_one_model() -> None:
    transformers = golden_folder("glm4", "config.json", "model.safetensors")
    published = golden_folder("glm4_remote_code_layout", "config.json", "model.safetensors")
    assert read_model_config(transformers) == read_model_config(published)
    assert same(load_folder(transformers), load_folder(published))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("chatglm_6b_3layers", "chatglm-6b"),
        ("chatglm3_6b", "chatglm"),
        ("glm4", "chatglm"),
        ("qwen2", "qwen2"),
        ("qwen2_tied", "qwen2"),
    ],
)
def test_original_folder_there_and_back(tmp_path: Path, name: str, family: str) -> None:
    folder = golden_folder(name, "config.json", "model.safetensors")
    assert read_model_config(folder).family == family
    values = json.loads((folder / "config.json").read_text())
    write_huggingface(tmp_path, values, load_folder(folder))
    original = {name: one for name, one in read_tensors(folder) if not name.endswith("inv_freq")}
    assert same(dict(read_tensors(tmp_path)), original)


def test_configs_of_the_original_folders() -> None:
    chatglm3 = read_model_config(golden_folder("chatglm3_6b", "config.json"))
    glm4 = read_model_config(golden_folder("glm4", "config.json"))
    tied = read_model_config(golden_folder("qwen2_tied", "config.json"))
    assert not isinstance(chatglm3, ModelConfig)
    assert not isinstance(glm4, ModelConfig)
    assert not isinstance(tied, ModelConfig)
    assert (chatglm3.rotary_dim, chatglm3.rope_theta, chatglm3.tied) == (8, 10000.0, False)
    assert (glm4.rope_theta, glm4.layernorm_epsilon) == (5e6, 1.5625e-07)
    assert glm4.eos_token_ids == (500, 507, 509)
    assert (tied.rotary_dim, tied.num_key_value_heads, tied.tied) == (16, 1, True)
