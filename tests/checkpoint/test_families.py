"""Every published layout: what its config.json means, and where its tensors go."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from glm_multiuser import device
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.backends.protocol import Backend
from glm_multiuser.build import make_model
from glm_multiuser.checkpoint import (
    families,
    read_model_config,
    read_tensors,
    write_huggingface,
)
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import CausalConfig, ModelConfig, RopeScaling
from glm_multiuser.weights import weights_of
from tests.checkpoint.folders import (
    CHATGLM2,
    CONFIG,
    FAMILIES,
    GLM4,
    GLM4_0414,
    LLAMA,
    MISTRAL,
    MODEL,
    QWEN2,
    QWEN3,
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
of_every_family = pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)


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
    neighbours: dict[str, Any] = {"hidden_size": 8, "rotary_dim": 2, "rotary_interleaved": True}
    halves: dict[str, Any] = {"hidden_size": 16, "rotary_dim": 4, "layernorm_epsilon": 1e-6}
    no_bias = {**halves, "qkv_bias": False}
    chatglm2 = CausalConfig("chatglm2", **neighbours, **shape)
    glm4_0414 = CausalConfig("glm4_0414", norm_position="both", **neighbours, **shape)
    llama = CausalConfig("llama", **no_bias, **shape)
    qwen2 = CausalConfig("qwen2", **halves, **shape)
    qwen3 = CausalConfig(
        "qwen3", query_key_norm=True, **{**shape, **no_bias, "head_dim": 6, "rotary_dim": 6}
    )
    assert {name: config_of(tmp_path, values) for name, values in FAMILIES.items()} == {
        "chatglm_6b": MODEL,
        "chatglm2": chatglm2,
        "glm4": chatglm2,
        "glm4_0414": glm4_0414,
        "llama": llama,
        "llama with biases": replace(llama, qkv_bias=True, dense_bias=True, mlp_bias=True),
        "mistral": llama,
        "qwen2": qwen2,
        "qwen2 tied": replace(qwen2, tied=True),
        "qwen3": qwen3,
        "qwen3 with biases": replace(qwen3, qkv_bias=True, dense_bias=True),
    }


def test_fields_that_are_left_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Of `MistralConfig`, `GlmConfig` and `Glm4Config`."""
    left_out = {"num_key_value_heads", "head_dim", "attention_bias"}
    values = {**MISTRAL, "hidden_size": 64, "num_attention_heads": 16}
    mistral = config_of(tmp_path, {key: one for key, one in values.items() if key not in left_out})
    assert mistral.num_key_value_heads == 8
    for values in (GLM4, GLM4_0414):
        glm = config_of(tmp_path, {key: one for key, one in values.items() if key not in left_out})
        assert (glm.num_key_value_heads, glm.head_dim, glm.qkv_bias) == (2, 128, True)
    with pytest.raises(CheckpointError, match="sliding_window is 4096; only null"):
        config_of(tmp_path, {key: one for key, one in MISTRAL.items() if key != "sliding_window"})


def test_these_are_all_layouts() -> None:
    layouts = [layout for family in families.FAMILIES.values() for layout in family.layouts]
    tested = [families.layout_of_config(values) for values in FAMILIES.values()]
    assert all(layout in tested for layout in layouts)


@pytest.mark.parametrize(
    ("rope", "scaling", "positions"),
    [
        ({"rope_type": "default"}, None, 64),
        ({"rope_type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0), 128),
        (
            {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 32},
            RopeScaling("llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
            64,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "original_max_position_embeddings": 8,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
            },
            RopeScaling("llama3", 32.0, 8, low_freq_factor=2.0, high_freq_factor=3.0),
            64,
        ),
        (
            {"rope_type": "yarn", "factor": 4.0},
            RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * math.log(4.0) + 1.0),
            256,
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 0.5,
            },
            RopeScaling("yarn", 2.0, 32, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5),
            64,
        ),
    ],
)
@pytest.mark.parametrize("values", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_rope_scaling_in_every_spelling(
    tmp_path: Path,
    values: dict[str, Any],
    rope: dict[str, Any],
    scaling: Optional[RopeScaling],
    positions: int,
) -> None:
    older = {"type" if name == "rope_type" else name: one for name, one in rope.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 5e6, "rope_scaling": rope},
        {"rope_theta": 5e6, "rope_scaling": older},
        {"rope_parameters": {"rope_theta": 5e6, **rope}},
    ]
    for spelling in spellings:
        config = config_of(tmp_path, {**values, **spelling})
        assert config.rope_theta == 5e6
        assert config.rope_scaling == scaling
        assert config.max_sequence_length == positions


def test_rows_per_head_of_chatglm2_are_rejected(tmp_path: Path) -> None:
    expected = "multi_query_attention is False; only true is computed here"
    without = {name: one for name, one in CHATGLM2.items() if name != "multi_query_attention"}
    for values in (without, {**CHATGLM2, "multi_query_attention": False}):
        with pytest.raises(CheckpointError, match=expected):
            config_of(tmp_path, values)


def test_published_sizes_of_chatglm3(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**CHATGLM2, "rope_ratio": 50, "eos_token_id": [3, 4]})
    assert config.rope_theta == 500000.0
    assert config.eos_token_ids == (3, 4)
    assert not config_of(tmp_path, {**CHATGLM2, "add_qkv_bias": False}).qkv_bias


@pytest.mark.parametrize("values", [GLM4, GLM4_0414, QWEN2])
def test_rope_parameters_of_transformers_5(tmp_path: Path, values: dict[str, Any]) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6}
    found = config_of(tmp_path, {**values, "rope_parameters": rope})
    assert found == config_of(tmp_path, {**values, "rope_theta": 5e6})
    assert found.rope_theta == 5e6


@of_every_family
def test_an_architecture_without_model_type(tmp_path: Path, values: dict[str, Any]) -> None:
    expected = config_of(tmp_path, values)
    without = {name: value for name, value in values.items() if name != "model_type"}
    assert config_of(tmp_path, without) == expected


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (CHATGLM2, {"rmsnorm": False}, "rmsnorm is False; only true is computed here"),
        (CHATGLM2, {"post_layer_norm": False}, "post_layer_norm is False"),
        (CHATGLM2, {"apply_residual_connection_post_layernorm": True}, "apply_residual_conn"),
        (CHATGLM2, {"add_bias_linear": True}, "add_bias_linear is True"),
        (CHATGLM2, {"interleaved_qkv": True}, "interleaved_qkv is True"),
        (CHATGLM2, {"pre_seq_len": 128}, "pre_seq_len is 128; only null is computed here"),
        (CHATGLM2, {"quantization_bit": 4}, "quantization_bit is 4; only 0 is computed here"),
        (CHATGLM2, {"vision_config": {"x": 1}}, "vision_config is"),
        (CHATGLM2, {"rope_ratio": "2"}, "rope_ratio is '2'; it must be a number between 1e-12"),
        (CHATGLM2, {"rope_ratio": 0}, "rope_ratio is 0; it must be a number between 1e-12"),
        (
            CHATGLM2,
            {"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k"},
            "rope_ratio is 16.0 in a ChatGLM2; only 1",
        ),
        (CHATGLM2, {"add_qkv_bias": 1}, "add_qkv_bias is 1; it must be true or false"),
        (CHATGLM2, {"multi_query_group_num": 3}, "4 cannot be shared out over .* 3"),
        (CHATGLM2, {"eos_token_id": 11}, "eos_token_id is 11; .* below the vocabulary's 11"),
        (CHATGLM2, {"eos_token_id": [2, "3"]}, r"eos_token_id is \[2, '3'\]"),
        (GLM4, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only \"silu\" is computed here"),
        (GLM4, {"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        (GLM4, {"partial_rotary_factor": 0.8}, "rotary_dim is 3; it must be even"),
        (GLM4_0414, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only \"silu\" is computed here"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only \"silu\" is computed here"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is computed"),
        (
            QWEN2,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; only 1 is computed",
        ),
        (QWEN2, {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "theta is 1; it"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096; only null is computed here"),
        (QWEN2, {"is_causal": False}, "is_causal is False; only true is computed here"),
        (LLAMA, {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        (LLAMA, {"mlp_bias": "no"}, "mlp_bias is 'no'; it must be true or false"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear'; only rope_type"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling is .*'dynamic'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3' needs a factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1; it must be a"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4}},
            "high_freq_factor is 4.0; it must exceed low_freq_factor 4.0",
        ),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1}}, "mscale is 1; it is"),
        (
            QWEN2,
            {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}},
            "truncate is false; only true",
        ),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window is True; only false"),
        (QWEN3, {"num_key_value_heads": 3}, "4 cannot be shared out over .* 3"),
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


OPTIONAL = {"multi_query_group_num", "num_key_value_heads", "head_dim", "eos_token_id"}
"""Older files have as many key/value heads as others, and heads that share out `hidden_size`;
`generation_config.json` and the tokenizer also name end tokens."""


@of_every_family
def test_every_size_is_needed(tmp_path: Path, values: dict[str, Any]) -> None:
    optional = {"eos_token_id"} if values is CONFIG else OPTIONAL
    sizes = {name for name, value in values.items() if type(value) is int} - optional
    assert len(sizes) >= 5
    for name in sizes:
        with pytest.raises(CheckpointError, match=f"{name} is missing|lacks .*{name}"):
            config_of(tmp_path, {key: one for key, one in values.items() if key != name})


# Weights


@pytest.mark.parametrize("write", [write_folder, write_shards])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "chatglm_6b"])
def test_names_and_values(tmp_path: Path, family: str, write: Any) -> None:
    values, arrays = FAMILIES[family], arrays_of(FAMILIES[family])
    write(tmp_path, arrays)
    write_json(tmp_path / "config.json", values)
    loaded = load_folder(tmp_path)
    assert same(loaded, arrays if values is CHATGLM2 else ours_of(arrays))


def ours_of(arrays: dict[str, Array]) -> dict[str, Array]:
    """What tensors as transformers names them become; written down without the library's tables."""
    found, left = {}, dict(arrays)

    def move(ours: str, *theirs: str) -> None:
        for word in ("weight", "bias"):
            names = [f"{one}.{word}" for one in theirs]
            if names[0] in left:
                found[f"{ours}.{word}"] = np.concatenate([left.pop(name) for name in names])

    move("transformer.embedding.word_embeddings", "model.embed_tokens")
    move("transformer.encoder.final_layernorm", "model.norm")
    move("transformer.output_layer", "lm_head")
    for layer in range(2):
        ours, theirs = f"transformer.encoder.layers.{layer}", f"model.layers.{layer}"
        for norm in ("input", "post_attention", "post_self_attn", "post_mlp"):
            move(f"{ours}.{norm}_layernorm", f"{theirs}.{norm}_layernorm")
        attention = f"{ours}.self_attention"
        query, key, value = (f"{theirs}.self_attn.{one}_proj" for one in "qkv")
        move(f"{attention}.query_key_value", query, key, value)
        move(f"{attention}.dense", f"{theirs}.self_attn.o_proj")
        for one, word in (("q", "query_weight"), ("k", "key_weight")):
            name = f"{theirs}.self_attn.{one}_norm.weight"
            if name in left:
                found[f"{attention}.query_key_norm.{word}"] = left.pop(name)
        move(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.gate_up_proj")
        move(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj")
        move(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.down_proj")
    assert not left
    return found


def test_parameters_of_the_model_that_reads_them(tmp_path: Path) -> None:
    """Written down without the library's own tables."""
    shapes = parameter_shapes(config_of(tmp_path, CHATGLM2))
    assert len(shapes) == 3 + 2 * 7
    assert shapes["transformer.embedding.word_embeddings.weight"] == (11, 8)
    assert shapes[f"{LAYER}self_attention.query_key_value.weight"] == ((4 + 2 + 2) * 4, 8)
    assert shapes[f"{LAYER}self_attention.query_key_value.bias"] == (32,)
    assert shapes[f"{LAYER}self_attention.dense.weight"] == (8, 16)
    assert shapes[f"{LAYER}mlp.dense_h_to_4h.weight"] == (12, 8)
    assert shapes[f"{LAYER}mlp.dense_4h_to_h.weight"] == (8, 6)
    assert shapes["transformer.output_layer.weight"] == (11, 8)
    shapes = parameter_shapes(config_of(tmp_path, {**QWEN2, "tie_word_embeddings": True}))
    assert len(shapes) == 2 + 2 * 7
    assert shapes[f"{LAYER}self_attention.query_key_value.weight"] == ((4 + 2 + 2) * 4, 16)
    assert shapes[f"{LAYER}mlp.dense_h_to_4h.weight"] == (12, 16)
    assert "transformer.output_layer.weight" not in shapes
    shapes = parameter_shapes(config_of(tmp_path, QWEN3))
    assert len(shapes) == 3 + 2 * 8
    assert shapes[f"{LAYER}self_attention.query_key_value.weight"] == ((4 + 2 + 2) * 6, 16)
    assert shapes[f"{LAYER}self_attention.dense.weight"] == (16, 24)
    assert shapes[f"{LAYER}self_attention.query_key_norm.query_weight"] == (6,)
    assert shapes[f"{LAYER}self_attention.query_key_norm.key_weight"] == (6,)
    shapes = parameter_shapes(config_of(tmp_path, FAMILIES["llama with biases"]))
    assert len(shapes) == 3 + 2 * 10
    assert shapes[f"{LAYER}self_attention.dense.bias"] == (16,)
    assert shapes[f"{LAYER}mlp.dense_h_to_4h.bias"] == (12,)
    assert shapes[f"{LAYER}mlp.dense_4h_to_h.bias"] == (16,)
    shapes = parameter_shapes(config_of(tmp_path, GLM4_0414))
    assert len(shapes) == 3 + 2 * 9
    for norm in ("input", "post_attention", "post_self_attn", "post_mlp"):
        assert shapes[f"{LAYER}{norm}_layernorm.weight"] == (8,)


@of_every_family
def test_parameters_are_those_of_the_cells(
    tmp_path: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, values)
    for backend in (NativeBackend(), PortableBackend()):
        weights = DEVICE_THREAD.call(partial(shapes_of_cells, config, backend))
        assert weights == parameter_shapes(config)
    assert caplog.messages == [], "MindSpore warns"


def shapes_of_cells(config: Any, backend: Backend) -> dict[str, tuple[int, ...]]:
    """On the device thread."""
    device.configure("CPU", 0)
    return {name: one.shape for name, one in weights_of(make_model(config, backend)).items()}


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    for number, (values, name) in enumerate(
        [
            (CHATGLM2, "transformer.rotary_pos_emb.inv_freq"),
            (QWEN2, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ]
    ):
        arrays = {**arrays_of(values), name: np.ones(1, np.float32)}
        load_folder(folder_of(tmp_path / str(number), values, arrays))


@of_every_family
def test_written_folder_is_read_back(tmp_path: Path, values: dict[str, Any]) -> None:
    loaded = load_folder(folder_of(tmp_path / "old", values))
    write_huggingface(tmp_path / "new", values, loaded)
    assert same(dict(read_tensors(tmp_path / "new")), dict(read_tensors(tmp_path / "old")))
    assert same(load_folder(tmp_path / "new"), loaded)


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in FAMILIES.items():
        whole = load_folder(folder_of(tmp_path / name, values), "float16")
        with monkeypatch.context() as patch:
            patch.setattr("glm_multiuser.checkpoint.placement.BLOCK_BYTES", 100)
            assert same(load_folder(tmp_path / name, "float16"), whole)


# What the original code wrote


def test_both_layouts_of_glm4_are_one_model() -> None:
    transformers = golden_folder("glm4", "config.json", "model.safetensors")
    published = golden_folder("glm4_remote_code_layout", "config.json", "model.safetensors")
    assert read_model_config(transformers) == read_model_config(published)
    assert same(load_folder(transformers), load_folder(published))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("chatglm_6b_3layers", "chatglm_6b"),
        ("chatglm3_6b", "chatglm2"),
        ("glm4", "chatglm2"),
        ("glm4_0414", "glm4_0414"),
        ("llama", "llama"),
        ("llama_tied", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2_tied", "qwen2"),
        ("qwen2_yarn", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3_tied", "qwen3"),
    ],
)
def test_original_folder_there_and_back(tmp_path: Path, name: str, family: str) -> None:
    folder = golden_folder(name, "config.json", "model.safetensors")
    assert read_model_config(folder).family == family
    values = json.loads((folder / "config.json").read_text())
    write_huggingface(tmp_path, values, load_folder(folder))
    original = {name: one for name, one in read_tensors(folder) if not name.endswith("inv_freq")}
    assert same(dict(read_tensors(tmp_path)), original)


@pytest.mark.parametrize("name", ["llama", "glm4_0414", "qwen2_yarn"])
def test_both_spellings_of_transformers_are_one_config(tmp_path: Path, name: str) -> None:
    spelling = "config_rope_parameters.json"
    folder = golden_folder(name, "config.json", spelling)
    values = json.loads((folder / spelling).read_text())
    assert "rope_parameters" in values
    assert config_of(tmp_path, values) == read_model_config(folder)


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
