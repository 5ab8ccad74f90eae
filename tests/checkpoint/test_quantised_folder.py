"""AWQ's and GPTQ's folders are read as they are stored, and answer as the same numbers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm_multiuser import CheckpointError
from glm_multiuser.backends.native.weight_types import types_in_groups
from glm_multiuser.checkpoint import (
    check_tensors,
    read_model_config,
    read_tensors,
    write_huggingface,
)
from glm_multiuser.checkpoint.convert import HUGGINGFACE, MINDFORMERS, convert
from glm_multiuser.checkpoint.quantised_folder import read_quantisation
from glm_multiuser.errors import ConfigError
from glm_multiuser.weights import load_weights
from tests.checkpoint.folders import GLM4, arrays_of, load_folder, same, write_json
from tests.checkpoint.quantised_content import Quantised, quantisation_config
from tests.golden_data import golden_folder
from tests.models.native_driver import NativeDriver, assert_logits_of_float32

METHODS = ("awq", "gptq")
GROUP = 32
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "sliding_window": None}
"""What makes a Llama of the golden Qwen2."""


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    golden = json.loads((golden_folder("qwen2") / "config.json").read_text("utf-8"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**golden, **config}), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantisation(method: str) -> dict[str, Any]:
    return {"quantization_config": quantisation_config(method, GROUP)}


def quantise(model: dict[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a model with other matrices: quantised, and in float32."""
    quantised, plain = {}, {}
    for seed, (name, values) in enumerate(model.items()):
        if is_quantised(name):
            matrix = Quantised.random(len(values), values.shape[1], GROUP, seed)
            module = name[: -len(".weight")]
            parts = matrix.tensors(method).items()
            quantised.update({f"{module}.{part}": array for part, array in parts})
            plain[name] = matrix.values()
        else:
            quantised[name] = plain[name] = values
    return quantised, plain


def folders(path: Path, method: str) -> tuple[Path, Path]:
    """The model of a golden folder with other matrices: quantised, and in float32."""
    golden = load_file(golden_folder("qwen2", "model.safetensors") / "model.safetensors")
    quantised, plain = quantise(golden, method)
    stored = write(path / "quantised", quantised, **quantisation(method))
    return stored, write(path / "plain", plain)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_float32_weights(tmp_path: Path, method: str) -> None:
    quantised, plain = folders(tmp_path, method)
    config = read_model_config(quantised)
    assert config == read_model_config(plain)
    types = types_in_groups(load_weights(quantised, config).types)
    assert set(types.values()) == {"int4", "float32"}
    assert sum(one == "int4" for one in types.values()) == 4 * config.num_layers
    token_ids = np.random.default_rng(0).integers(3, config.vocab_size, 41).tolist()

    def logits(folder: Path, **settings: Any) -> np.ndarray:
        driver = NativeDriver.of_folder(folder, 1, 64, **settings)
        return driver.answer(0, driver.request(token_ids), 4)

    expected = logits(plain)
    assert_logits_of_float32(logits(quantised, types=types), expected, "int4")
    widened = logits(quantised)
    assert widened.tobytes() == expected.tobytes(), "widened while they are loaded"


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("method", METHODS)
def test_values_of_every_group_size(tmp_path: Path, method: str, group: int) -> None:
    matrix = Quantised.random(40, 512, group)
    tensors = {f"a.{part}": array for part, array in matrix.tensors(method).items()}
    config = {"quantization_config": quantisation_config(method, group)}
    found = dict(read_tensors(write(tmp_path / "a", tensors, **config)))
    assert list(found) == ["a.weight"]
    assert found["a.weight"].tobytes() == matrix.values().tobytes()


def test_zero_points_of_gptq(tmp_path: Path) -> None:
    """One less is stored of each, and 0 borrows from the next one of the same word; in the second
    version of the format they are as is."""
    matrix = Quantised.random(16, 64, 32)
    matrix.zero[...] = np.arange(32).reshape(16, 2) % 16
    for version in ("gptq", "gptq_v2"):
        tensors = {f"a.{part}": array for part, array in matrix.tensors(version).items()}
        config = quantisation_config("gptq", 32, checkpoint_format=version)
        folder = write(tmp_path / version, tensors, quantization_config=config)
        assert np.array_equal(dict(read_tensors(folder))["a.weight"], matrix.values())


def test_a_bias_of_zeros_that_no_layer_has_is_left_out(tmp_path: Path) -> None:
    """AutoGPTQ up to 0.4 wrote one for every layer; here the model is a Llama without any."""
    quantised, _ = folders(tmp_path, "gptq")
    tensors = load_file(quantised / "model.safetensors")
    for name in [one for one in tensors if one.endswith(".qweight")]:
        outputs = tensors[name].shape[1]
        tensors[name.replace("qweight", "bias")] = np.zeros(outputs, np.float16)
    llama = write(tmp_path / "llama", tensors, **LLAMA, **quantisation("gptq"))
    check_tensors(llama, read_model_config(llama))
    for part in ("self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.0.{part}.bias"
        changed = tensors[name].copy()
        changed[3] = 1
        save_file({**tensors, name: changed}, llama / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{name} .* has no place in this model"):
            check_tensors(llama, read_model_config(llama))


def test_a_bias_of_zeros_that_a_layer_has_is_kept(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, "awq")
    tensors = load_file(quantised / "model.safetensors")
    for name in [one for one in tensors if one.endswith("o_proj.qweight")]:
        name = name.replace("qweight", "bias")
        tensors[name] = np.zeros(64, np.float16)
    config = {"attention_bias": True, **LLAMA, **quantisation("awq")}
    llama = write(tmp_path / "llama", tensors, **config)
    check_tensors(llama, read_model_config(llama))
    assert not dict(read_tensors(llama))[name].any()


def test_converted_weights_are_floats(tmp_path: Path) -> None:
    values = {**GLM4, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32}
    quantised, plain = quantise(arrays_of(values), "awq")
    old = tmp_path / "old"
    old.mkdir()
    save_file(quantised, old / "model.safetensors")
    write_json(old / "config.json", {**values, **quantisation("awq")})
    for source, new, to in (
        ("old", "mindformers", MINDFORMERS),
        ("mindformers", "new", HUGGINGFACE),
    ):
        convert(tmp_path / source, tmp_path / new, to, None, None, False, lambda *a: None)
        assert json.loads((tmp_path / new / "config.json").read_text("utf-8")) == values
    assert same(load_file(tmp_path / "new" / "model.safetensors"), plain)
    write_huggingface(tmp_path / "written", {**values, **quantisation("awq")}, load_folder(old))
    assert same(load_folder(tmp_path / "written"), load_folder(old))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method must be awq or gptq"),
        ({"bits": 8}, "has bits 8; it must be 4"),
        ({"rotation": "hadamard"}, "has rotation 'hadamard'; it must be None"),
        ({"desc_act": True}, "has desc_act True; it must be False"),
        ({"version": "gemv"}, "has version 'gemv'; it must be 'gemm'"),
        ({"group_size": 48}, "has group_size 48; it must be a multiple of 32"),
        ({"group_size": 0}, "has group_size 0"),
        ({"group_size": -1}, "has group_size -1"),
        ({"group_size": None}, "has group_size None"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = {"quantization_config": quantisation_config("awq", 32, **changes)}
    folder = write(tmp_path / "a", {"a": np.zeros(1, np.float32)}, **config)
    for read in (read_model_config, lambda one: list(read_tensors(one))):
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
            read(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint_format": None}, 1),
        ({"checkpoint_format": "GPTQ_V2"}, 0),
        ({"checkpoint_format": None, "format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, 1),
        ({"checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'; with GPTQ it must be"),
        ({"checkpoint_format": ["gptq"]}, r"has checkpoint_format \['gptq'\]"),
        ({"checkpoint_format": "", "format": "gptq_p"}, "has format 'gptq_p'"),
    ],
)
def test_format_of_gptq(changes: dict[str, Any], expected: Any) -> None:
    config = {"quantization_config": quantisation_config("gptq", 32, **changes)}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            read_quantisation(config)
    else:
        assert read_quantisation(config) == ("gptq", 32, expected)


@pytest.mark.parametrize(
    ("order", "found"),
    [(np.zeros(32, np.int32), r"I32 \[32\]"), (np.zeros(64, np.float32), r"F32 \[64\]")],
)
def test_an_order_that_does_not_fit(tmp_path: Path, order: Any, found: str) -> None:
    parts = {**Quantised.random(40, 64, 32).tensors("gptq"), "g_idx": order}
    tensors = {f"a.{one}": array for one, array in parts.items()}
    folder = write(tmp_path / "a", tensors, **quantisation("gptq"))
    with pytest.raises(CheckpointError, match=rf"a\.g_idx in .* is {found}; it must be I32 \[64\]"):
        list(read_tensors(folder))


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit(tmp_path: Path, part: str) -> None:
    parts = Quantised.random(40, 64, 32).tensors("gptq")
    config = {"quantization_config": quantisation_config("gptq", 32)}
    parts[part] = parts[part][::-1].copy() if part == "g_idx" else parts[part][:-1]
    tensors = {f"a.{one}": array for one, array in parts.items()}
    message = "inputs are not in their order" if part == "g_idx" else r"it must be (I32|F16) \["
    with pytest.raises(CheckpointError, match=message):
        list(read_tensors(write(tmp_path / "a", tensors, **config)))
    if part not in ("qweight", "g_idx"):
        del tensors[f"a.{part}"]
        with pytest.raises(CheckpointError, match=rf"a\.{part} in .* is missing"):
            list(read_tensors(write(tmp_path / "b", tensors, **config)))
