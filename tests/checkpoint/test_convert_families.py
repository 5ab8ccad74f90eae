"""Converting the causal families: every bit arrives, whichever way they are stored."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import pytest
from safetensors.numpy import load_file

from glm_multiuser.checkpoint import read_model_config, write_mindformers
from glm_multiuser.checkpoint.ckpt_file import open_ckpt
from glm_multiuser.checkpoint.convert import HUGGINGFACE, MINDFORMERS, convert
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.checkpoint.matching import NO_WEIGHT_OF_MINDFORMERS
from glm_multiuser.checkpoint.mindformers_arguments import mindformers_arguments
from glm_multiuser.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import (
    CHATGLM2,
    FAMILIES,
    GLM4,
    Array,
    arrays_of,
    load_folder,
    same,
    write_folder,
    write_json,
    write_shards,
)

EMBEDDING = "transformer.embedding.word_embeddings.weight"


def folder_of(folder: Path, values: dict[str, Any], dtype: str = "float32") -> Path:
    write_shards(folder, arrays_of(values, dtype))
    write_json(folder / "config.json", values)
    return folder


def convert_quietly(source: Path, destination: Path, to: str, dtype: Optional[str] = None) -> Path:
    convert(source, destination, to, dtype, None, False, lambda done, total, what: None)
    return destination


def read_ckpt(path: Path) -> dict[str, Array]:
    tensors = open_ckpt([path], NO_WEIGHT_OF_MINDFORMERS)
    return {name: tensor.read() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("values", [CHATGLM2, GLM4], ids=["chatglm2", "glm4"])
def test_there_and_back(tmp_path: Path, values: dict[str, Any], dtype: str) -> None:
    old = folder_of(tmp_path / "old", values, dtype)
    between = convert_quietly(old, tmp_path / "between", MINDFORMERS)
    theirs = load_folder(old, dtype)
    theirs["transformer.embedding.embedding_weight"] = theirs.pop(EMBEDDING)
    assert same(read_ckpt(between / "model.ckpt"), theirs)
    assert same(load_folder(between, dtype), load_folder(old, dtype))
    new = convert_quietly(between, tmp_path / "new", HUGGINGFACE)
    assert same(load_file(new / "model.safetensors"), arrays_of(values, dtype))
    assert json.loads((new / "config.json").read_text()) == values


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_the_type_is_written_where_it_was(tmp_path: Path, field: str) -> None:
    """Recent versions of transformers call it dtype."""
    old = folder_of(tmp_path / "old", {**CHATGLM2, field: "bfloat16"})
    new = convert_quietly(old, tmp_path / "new", MINDFORMERS, "float16")
    config = json.loads((new / "config.json").read_text())
    assert {name: config.get(name) for name in ("torch_dtype", "dtype")} == {
        **dict.fromkeys(("torch_dtype", "dtype")),
        field: "float16",
    }


def test_what_mindformers_keeps_beside_the_weights(tmp_path: Path) -> None:
    """Its caches, and what its converter takes over."""
    loaded = load_folder(folder_of(tmp_path / "old", CHATGLM2))
    write_mindformers(tmp_path / "new", CHATGLM2, loaded)
    assert same(load_folder(tmp_path / "new"), loaded)
    prefix = "transformer.encoder.layers.0.self_attention.infer_attention.paged_attention_mgr."
    for name in (
        f"{prefix}key_cache",
        f"{prefix}value_cache",
        "transformer.rotary_pos_emb.inv_freq",
    ):
        assert NO_WEIGHT_OF_MINDFORMERS.search(name)
    for name in parameter_shapes(read_model_config(tmp_path / "old")):
        assert not NO_WEIGHT_OF_MINDFORMERS.search(name)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_files_become_safetensors(
    tmp_path: Path, family: str, dtype: Optional[str]
) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed: make torch")
    values, arrays = FAMILIES[family], arrays_of(FAMILIES[family])
    (tmp_path / "old").mkdir()
    tensors = {name: torch.from_numpy(one) for name, one in arrays.items()}
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    write_json(tmp_path / "old" / "config.json", values)
    new = convert_quietly(tmp_path / "old", tmp_path / "new", HUGGINGFACE, dtype)
    assert sorted(path.name for path in new.iterdir()) == ["config.json", "model.safetensors"]
    expected = {name: one.astype(dtype or one.dtype) for name, one in arrays.items()}
    assert same(load_file(new / "model.safetensors"), expected)


@pytest.mark.parametrize("family", ["glm4_0414", "llama", "qwen2", "qwen3"])
def test_families_without_a_layout_of_mindformers(tmp_path: Path, family: str) -> None:
    message = (
        f"family {family!r} has no .ckpt layout of MindFormers that can be read or written; "
        "those are of 'chatglm_6b', 'chatglm2'"
    )
    values = FAMILIES[family]
    old = folder_of(tmp_path / "old", values)
    with pytest.raises(CheckpointError, match=message):
        convert_quietly(old, tmp_path / "new", MINDFORMERS)
    with pytest.raises(CheckpointError, match=message):
        write_mindformers(tmp_path / "new", values, load_folder(old))
    assert not (tmp_path / "new").exists()
    for file in old.glob("*.safetensors*"):
        file.unlink()
    (old / "model.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        load_folder(old)


def test_models_that_mindformers_cannot_compute(tmp_path: Path) -> None:
    for values, message in (
        ({**CHATGLM2, "tie_word_embeddings": True}, "tie_word_embeddings is true; MindFormers'"),
        ({**GLM4, "partial_rotary_factor": 1.0}, "rotary_dim is 4; .* half of head_dim, 4"),
    ):
        old = folder_of(tmp_path / message[:5], values)
        with pytest.raises(ConfigError, match=message):
            convert_quietly(old, tmp_path / "new", MINDFORMERS)
        assert not (tmp_path / "new").exists()


def test_arguments_of_chatglm2_config(tmp_path: Path) -> None:
    values = {**CHATGLM2, "rope_ratio": 500, "eos_token_id": [2, 5], "pad_token_id": 5}
    write_json(tmp_path / "config.json", values)
    found = mindformers_arguments(read_model_config(tmp_path), values, "float16")
    assert found["rope_ratio"] == 500
    assert found["eos_token_id"] == [2, 5]
    assert (found["pad_token_id"], found["seq_length"]) == (5, 64)
    assert found["param_init_type"] == found["compute_dtype"] == "float16"


IN_MINDFORMERS = """
import json, sys
from pathlib import Path
import mindspore
import numpy as np
from mindformers import ChatGLM2Config, ChatGLM2ForConditionalGeneration
from safetensors.numpy import load_file

old, new = map(Path, sys.argv[1:])
config = ChatGLM2Config(**json.loads((new / "mindformers_config.json").read_text()))
model = ChatGLM2ForConditionalGeneration(config)
parameters = mindspore.load_checkpoint(str(new / "model.ckpt"))
not_loaded, not_known = mindspore.load_param_into_net(model, parameters)
expected = load_file(old / "model.safetensors")
unequal = []
for name, parameter in model.parameters_dict().items():
    theirs = name.replace("embedding_weight", "word_embeddings.weight")
    if name not in not_loaded and not np.array_equal(parameter.asnumpy(), expected.pop(theirs)):
        unequal.append(name)
print(json.dumps([not_loaded, not_known, unequal, list(expected)]))
"""


@pytest.mark.skipif(find_spec("mindformers") is None, reason="MindFormers is not installed")
def test_mindformers_loads_it(tmp_path: Path) -> None:
    """The names and shapes that its own GLM2 asks for; that code is not of this project."""
    old = write_folder(tmp_path / "old", arrays_of(CHATGLM2))
    write_json(old / "config.json", CHATGLM2)
    new = convert_quietly(old, tmp_path / "new", MINDFORMERS, "float32")
    child = subprocess.run(
        [sys.executable, "-c", IN_MINDFORMERS, str(old), str(new)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stderr
    not_loaded, not_known, unequal, left_over = json.loads(child.stdout.splitlines()[-1])
    assert len(not_loaded) == 4
    assert all(name.endswith(("key_cache", "value_cache")) for name in not_loaded)
    assert not_known == unequal == left_over == []
