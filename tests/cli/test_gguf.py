"""GGUF files wherever a checkpoint is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from tokenizers import Tokenizer

from glm_multiuser.checkpoint import read_model_config, read_tensors
from glm_multiuser.cli.loading import check_engine, find_checkpoint
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.server.settings import model_settings
from glm_multiuser.tokenizers import load_tokenizer
from tests.checkpoint.folders import load_folder, same
from tests.checkpoint.gguf_content import Content, gguf_model, load_all
from tests.golden_data import golden_folder

MODEL = gguf_model("qwen3.Q8_0")


def test_a_file_and_a_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(MODEL)
    for place in (MODEL, tmp_path):
        assert find_checkpoint(place) == place
        check_engine(place, EngineConfig(users=2, seq_length=64))
    with pytest.raises(ConfigError, match="seq_length is 4096; this model's max_sequence_length"):
        check_engine(MODEL, EngineConfig(users=2, seq_length=4096))


def test_no_model_in_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    for place in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match="is no GGUF file"):
            check_engine(place, EngineConfig())
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*none\.gguf"):
        find_checkpoint(tmp_path / "none.gguf")


def test_the_name_of_a_served_model() -> None:
    places = [str(MODEL), f"tiny={MODEL}"]
    found = model_settings(places, EngineConfig(), load=True)
    assert [(one.name, one.folder) for one in found] == [("qwen3.Q8_0", MODEL), ("tiny", MODEL)]
    with pytest.raises(ConfigError, match="checkpoint is 'tiny='; it must be NAME=FOLDER"):
        model_settings(["tiny="], EngineConfig(), load=True)


@pytest.mark.parametrize("name", ["qwen3.Q8_0", "llama_spm.F16", "glm4.Q4_K_S", "chatglm.F32"])
def test_convert(run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """The folder has the same model and gives the same ids."""
    model, new = gguf_model(name), tmp_path / "new"
    result = run("convert", model, new)
    assert result.exit_code == 0, result.output
    assert read_model_config(new) == read_model_config(model)
    assert same(load_folder(new), load_all(model))
    there, here = load_tokenizer(model), load_tokenizer(new)
    assert there is not None
    assert here is not None
    assert set(here.stop_token_ids) >= set(there.stop_token_ids)
    assert here.special == there.special
    for text in ("the cat  12", " 中文 and 😀", "<|im_end|></s>\n\n"):
        assert here.encode(text) == there.encode(text)
        assert here.decode(here.encode(text)) == there.decode(there.encode(text))
    if name.startswith("qwen3"):
        library = Tokenizer.from_file(str(new / "tokenizer.json"))
        text = "<|im_start|>the cat  12<|im_end|>"
        middle = there.encode("the cat  12")
        ids = [there.special["<|im_start|>"], *middle, there.special["<|im_end|>"]]
        assert library.encode(text).ids == ids
        assert here.encode_prompt("the cat") == there.encode_prompt("the cat")
    dtypes = {one.dtype for _, one in read_tensors(new)}
    half = {np.dtype(np.float16)} if name.endswith("F16") else set()
    assert dtypes == {np.dtype(np.float32)} | half


def test_what_convert_refuses(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("convert", MODEL, tmp_path / "new", "--to", "mindformers")
    assert result.exit_code == 2
    assert "is a GGUF model; it can only become huggingface" in result.stderr
    content = Content.of(gguf_model("llama_bpe.F32"))
    factors = content.tensor("rope_freqs.weight")
    factors.content = np.linspace(1, 8, factors.shape[0], dtype=np.float32).tobytes()
    result = run("convert", content.write(tmp_path / "other.gguf"), tmp_path / "new")
    assert result.exit_code == 2
    assert "no config.json of LlamaForCausalLM describes" in result.stderr
    content = Content.of(gguf_model("qwen3.F32"))
    content.metadata["qwen3.rope.dimension_count"] = 2
    result = run("convert", content.write(tmp_path / "other.gguf"), tmp_path / "new")
    assert result.exit_code == 2
    assert "no config.json of Qwen3ForCausalLM describes" in result.stderr
    content = Content.of(gguf_model("glm4.F32"))
    content.metadata["glm4.rope.dimension_sections"] = np.array([2, 1, 1, 0], "<i4")
    result = run("convert", content.write(tmp_path / "other.gguf"), tmp_path / "new")
    assert result.exit_code == 2
    assert "has rope.dimension_sections; its rows are in another order" in result.stderr
    del content.metadata["general.architecture"]
    result = run("convert", content.write(tmp_path / "other.gguf"), tmp_path / "new")
    assert result.exit_code == 2
    assert "general.architecture of" in result.stderr
    assert not (tmp_path / "new").exists()


def test_convert_finds_the_scaling_of_llama_3(run: Callable[..., Any], tmp_path: Path) -> None:
    """The file has only what each frequency is divided by; the original config.json has more."""
    expected = json.loads((golden_folder("gguf_models") / "expected.json").read_text("utf-8"))
    original = expected["files"]["llama_bpe.F32.gguf"]["hf_config"]["rope_scaling"]
    assert run("convert", gguf_model("llama_bpe.F32"), tmp_path / "new").exit_code == 0
    found = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
    assert found["rope_scaling"] == {name: original[name] for name in found["rope_scaling"]}
    assert found["rope_theta"] == original["rope_theta"]


def test_convert_with_the_original_config(run: Callable[..., Any], tmp_path: Path) -> None:
    expected = json.loads((golden_folder("gguf_models") / "expected.json").read_text("utf-8"))
    values = expected["files"]["llama_bpe.F32.gguf"]["hf_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = gguf_model("llama_bpe.F32")
    config = ("--config", tmp_path / "config.json")
    assert run("convert", model, tmp_path / "new", *config).exit_code == 0
    assert same(load_folder(tmp_path / "new"), load_all(model))


def test_plan(run: Callable[..., Any]) -> None:
    result = run("plan", "--model", MODEL, "--device-memory", "1GiB", "--seq-length", "64")
    assert result.exit_code == 0, result.output
    assert "384 B" in result.stdout  # a token in float16: 2 layers, 2 heads of 24, keys and values
