"""The model that the metadata describe, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest

from glm_multiuser.checkpoint import (
    check_tensors,
    read_generation_defaults,
    read_model_config,
    write_huggingface,
)
from glm_multiuser.checkpoint.families import model_config_of
from glm_multiuser.checkpoint.gguf.rope import as_llama3
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import CausalConfig, RopeScaling
from glm_multiuser.models.rotary import scaled_frequencies
from tests.checkpoint.folders import load_folder, same
from tests.checkpoint.gguf_content import Content, Tensor, gguf_model, load_all
from tests.golden_data import golden_folder

Change = Callable[[Content], object]


def expected() -> dict[str, Any]:
    file = golden_folder("gguf_models") / "expected.json"
    files: dict[str, Any] = json.loads(file.read_text("utf-8"))["files"]
    return files


def config_of(content: Content, folder: Path) -> CausalConfig:
    config = read_model_config(content.write(folder / "a.gguf"))
    assert isinstance(config, CausalConfig)
    return config


def config_of_size(head_dim: int, theta: float) -> CausalConfig:
    config = read_model_config(gguf_model("llama_bpe.F32"))
    assert isinstance(config, CausalConfig)
    return replace(config, head_dim=head_dim, rotary_dim=head_dim, rope_theta=theta)


def test_the_model_of_the_config_json() -> None:
    for name, file in expected().items():
        found = read_model_config(golden_folder("gguf_models") / name)
        hugging_face = model_config_of(file["hf_config"], Path("config.json"))
        assert isinstance(found, CausalConfig)
        assert isinstance(hugging_face, CausalConfig)
        # Llama 3.1's scaling is kept as what comes out of it.
        frequencies, factor = scaled_frequencies(hugging_face)
        np.testing.assert_allclose(scaled_frequencies(found)[0], frequencies, rtol=2e-7)
        assert scaled_frequencies(found)[1] == factor
        assert replace(found, rope_scaling=None) == replace(hugging_face, rope_scaling=None), name


@pytest.mark.parametrize(("factor", "head_dim", "theta"), [(8.0, 128, 5e5), (32.0, 64, 5e5)])
def test_the_scaling_of_llama_3_is_found(factor: float, head_dim: int, theta: float) -> None:
    """Of Llama 3.1 8B and Llama 3.2 1B, from what llama.cpp's converter writes."""
    config = config_of_size(head_dim, theta)
    wanted = RopeScaling("llama3", factor, 8192, 1.0, 4.0)
    kept = scaled_frequencies(replace(config, rope_scaling=None))[0]
    scaled = scaled_frequencies(replace(config, rope_scaling=wanted))[0]
    factors = tuple((kept / scaled).astype(np.float32).tolist())
    found = as_llama3(replace(config, rope_scaling=RopeScaling("factors", 1.0, factors=factors)))
    assert found == wanted


def test_rows_are_where_a_safetensors_file_has_them(tmp_path: Path) -> None:
    """Written in the layout of transformers and read again, with the numbers of the file."""
    for name in ("llama_spm.F16", "glm4.F32", "chatglm.F32"):
        values = expected()[f"{name}.gguf"]["hf_config"]
        arrays = load_all(gguf_model(name))
        write_huggingface(tmp_path / name, values, arrays)
        assert same(load_folder(tmp_path / name), arrays)
    content = Content.of(gguf_model("llama_spm.F16"))
    # [heads, pairs, 2]: as convert_hf_to_gguf.py permutes [heads, 2, pairs].
    stored = np.frombuffer(content.tensor("blk.0.attn_q.weight").content, "<f2").reshape(
        4, 4, 2, 32
    )
    loaded = load_all(gguf_model("llama_spm.F16"))
    (fused,) = [one for key, one in loaded.items() if "layers.0" in key and "query_key" in key]
    np.testing.assert_array_equal(fused[:32].reshape(4, 2, 4, 32), stored.swapaxes(1, 2))


class TestRope:
    def test_yarn(self, tmp_path: Path) -> None:
        content = Content.of(gguf_model("qwen2.F32"))
        content.metadata.update(
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 1024,
            }
        )
        config = config_of(content, tmp_path)
        assert config.rope_scaling == RopeScaling(
            "yarn", 4.0, 1024, attention_factor=0.1 * np.log(4.0) + 1
        )
        assert config.max_sequence_length == 4096

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"scaling.type": "linear", "scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
            ({"scaling.type": "linear"}, RopeScaling("linear", 1.0)),
            ({"scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
            ({"scale_linear": 2.0}, RopeScaling("linear", 2.0)),
            ({"scale_linear": 0.0}, None),
            ({"scaling.factor": 0.0, "scale_linear": 2.0}, None),
            ({"scaling.type": "none", "scaling.factor": 2.0}, None),
        ],
    )
    def test_linear(
        self, tmp_path: Path, fields: dict[str, Any], expected: Optional[RopeScaling]
    ) -> None:
        """As llama.cpp has it: a type that is missing is linear, and a factor of 0 is 1."""
        content = Content.of(gguf_model("qwen2.F32"))
        content.metadata.update({f"qwen2.rope.{key}": value for key, value in fields.items()})
        assert config_of(content, tmp_path).rope_scaling == expected


def test_sampling_of_the_file(tmp_path: Path) -> None:
    content = Content.of(gguf_model("qwen2.F32"))
    sampling = {"temp": 0.6, "top_k": 20, "min_p": 0.05}
    content.metadata.update({f"general.sampling.{key}": one for key, one in sampling.items()})
    path = content.write(tmp_path / "a.gguf")
    assert read_generation_defaults(path) == {"temperature": 0.6, "top_k": 20, "min_p": 0.05}
    assert read_generation_defaults(gguf_model("qwen2.F32")) == {}


def test_an_output_layer_of_its_own(tmp_path: Path) -> None:
    """Whether it is tied depends on the file's tensors."""
    content = Content.of(gguf_model("qwen2.F32"))
    assert config_of(content, tmp_path).tied
    embedding = content.tensor("token_embd.weight")
    content.tensors.append(replace(embedding, name="output.weight"))
    assert not config_of(content, tmp_path).tied
    assert "transformer.output_layer.weight" in load_all(tmp_path / "a.gguf")


def without(key: str) -> Change:
    return lambda content: content.metadata.pop(key)


def setting(**values: Any) -> Change:
    return lambda content: content.metadata.update(
        {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    )


def without_end(content: Content) -> None:
    content.metadata["tokenizer.ggml.model"] = "gpt2"
    del content.metadata["tokenizer.ggml.eos_token_id"]


def cut_vocabulary(content: Content) -> None:
    content.metadata["tokenizer.ggml.tokens"].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("general.architecture"), "general.architecture of .* is None"),
        (
            lambda one: one.metadata.update({"general.architecture": "gemma"}),
            "is 'gemma'; those that can be read are 'llama', 'qwen2', 'qwen3', 'chatglm', 'glm4'",
        ),
        (without("llama.block_count"), "llama.block_count is missing"),
        (without("llama.attention.layer_norm_rms_epsilon"), "epsilon is missing"),
        (without_end, "eos_token_id is missing"),
        (setting(block_count=3), "lacks blk.2"),
        (setting(block_count="2"), "num_hidden_layers is '2'"),
        (setting(embedding_length=1 << 31), "hidden_size is 2147483648"),
        (setting(attention__head_count=0), "num_attention_heads is 0"),
        (setting(attention__head_count_kv=np.ones(2, "<i4")), r"key_value_heads is \[1, 1\]"),
        (
            setting(attention__key_length=16, rope__dimension_count=16),
            r"blk.0.attn_q.weight in .* has shape \[32, 32\]; this model needs \[64, 32\]",
        ),
        (setting(attention__value_length=4, attention__key_length=8), "value_length is 4; only 8"),
        (setting(attention__sliding_window=64), "sliding_window is 64"),
        (setting(attention__causal=False), "attention.causal is False; only true"),
        (setting(expert_count=8), "expert_count is 8"),
        (setting(rope__dimension_count=4), "rope.dimension_count is 4; only 8"),
        (setting(rope__scaling__type="longrope"), "'longrope'.*; only rope_type"),
        (setting(rope__scaling__attn_factor=2.0), "attn_factor is 2.0; only 1.0"),
        (setting(vocab_size=100), "100 by vocab_size, 384 by tokenizer.ggml.tokens"),
        (cut_vocabulary, "383 by tokenizer.ggml.tokens, 384 by token_embd.weight"),
        (lambda one: one.metadata.update({"tokenizer.ggml.eos_token_id": 384}), "eos_token_id is"),
        (
            lambda one: one.tensors.append(Tensor("rope_freqs.weight", 0, (2,), bytes(8))),
            r"rope_freqs.weight has shape \[2\]; this model needs \[4\]",
        ),
        (
            lambda one: one.tensors.append(Tensor("rope_freqs.weight", 0, (4,), bytes(16))),
            "not finite and positive",
        ),
        (
            lambda one: one.tensors.append(Tensor("blk.0.ffn_gate_inp.weight", 0, (8,), bytes(32))),
            r"blk.0.ffn_gate_inp.weight \[8\] in .* has no place in this model",
        ),
    ],
)
def test_models_that_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    content = Content.of(gguf_model("llama_spm.F16"))
    change(content)
    path = content.write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=message):
        check_tensors(path, read_model_config(path))
