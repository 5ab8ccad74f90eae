"""Broken checkpoint folders: each gives one error that names what is wrong, and loads nothing."""

from __future__ import annotations

import json
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm_multiuser.checkpoint import load_checkpoint, read_model_config
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import (
    GLM4,
    QWEN2,
    arrays_of,
    write_folder,
    write_json,
    write_shards,
    write_stored_as,
)

NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"

Break = Callable[[Path], object]
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: make torch"
)


def load(folder: Path) -> list[str]:
    """As `MultiUserLLM` does it; -> the parameters that were assigned."""
    assigned: list[str] = []
    config = read_model_config(folder)
    parameters = {name: (shape, np.dtype("f4")) for name, shape in parameter_shapes(config).items()}
    try:
        load_checkpoint(folder, config, parameters, lambda name, _: assigned.append(name))
    except CheckpointError:
        assert assigned == []
        raise
    return assigned


def loads(folder: Path) -> None:
    """Checks that every parameter is assigned, each once."""
    assert sorted(load(folder)) == sorted(parameter_shapes(read_model_config(folder)))


def check(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def configured(**changes: Any) -> Break:
    """Other values in config.json; ... takes one away."""
    values = {name: one for name, one in {**QWEN2, **changes}.items() if one is not ...}
    return lambda folder: write_json(folder / "config.json", values)


def written(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def removed(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def cut(name: str, by: int = 10) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def changed(**arrays: Any) -> Break:
    """Other tensors in model.safetensors (__ is a dot); None takes one away."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        names = {name.replace("__", "."): one for name, one in arrays.items()}
        tensors = {**load_file(path), **names}
        save_file({name: one for name, one in tensors.items() if one is not None}, path)

    return change


def placed(name: str, shard: Any) -> Break:
    """Another file for a tensor in the index."""

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = shard
        write_json(folder / INDEX, index)

    return change


def integers(folder: Path) -> None:
    write_stored_as(folder / "model.safetensors", NORM, "I8", [16], bytes(16))


def mostly(*shape: int) -> Any:
    return np.ones(shape, np.float32)


CONFIGS: dict[str, tuple[Break, str]] = {
    "no config.json": (removed("config.json"), r"cannot read .*config\.json: No such file"),
    "not JSON": (written("config.json", "{"), r"config\.json is not JSON"),
    "not an object": (written("config.json", "[1]"), r"config\.json holds list, not a JSON obj"),
    "empty": (written("config.json", "{}"), "model_type None with architectures None is not a"),
    "unknown model_type": (
        configured(model_type="gemma", architectures=["GemmaForCausalLM"]),
        r"model_type 'gemma' with architectures \['GemmaForCausalLM'\] is not a model that",
    ),
    "model_type is no text": (configured(model_type=["qwen2"]), r"model_type \['qwen2'\]"),
    "missing size": (
        configured(intermediate_size=...),
        r"config\.json: intermediate_size is missing",
    ),
    "size is text": (configured(hidden_size="16"), "hidden_size is '16'; it must be a whole"),
    "size below one": (configured(num_hidden_layers=0), "num_hidden_layers is 0; it must be"),
    "heads do not divide": (configured(num_key_value_heads=3), "num_key_value_heads 3"),
    "end of answers beyond the vocabulary": (configured(eos_token_id=99), "eos_token_id is 99"),
}

TENSORS: dict[str, tuple[Break, str]] = {
    "cut short": (cut("model.safetensors"), r"model\.safetensors is broken, cut short"),
    "empty file": (written("model.safetensors", ""), r"model\.safetensors is broken, cut short"),
    "git-lfs pointer": (
        written("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "not a safetensors file",
    ),
    "no weights": (removed("model.safetensors"), "no weights in .*pytorch_model.bin.* is there"),
    "whole numbers": (integers, f"{NORM} in .* is stored as I8"),
    "vocabulary mismatch": (
        configured(vocab_size=12),
        r"lm_head.weight in .* has shape \[11, 16\]; this model needs \[12, 16\]",
    ),
    "fewer layers": (configured(num_hidden_layers=3), r"lacks model\.layers\.2\..*tensors: 12"),
    "more layers": (configured(num_hidden_layers=1), r"model\.layers\.1\..* has no place"),
    "another layout": (
        lambda folder: write_json(folder / "config.json", GLM4),
        r"lm_head.weight in .* has shape \[11, 16\]; this model needs \[11, 8\]",
    ),
    "part of a parameter": (
        changed(**{KEYS.replace(".", "__"): None}),
        rf"lacks {KEYS}, expected with shape \[8, 16\]; missing tensors: 1",
    ),
    "misshapen part of a parameter": (
        changed(**{KEYS.replace(".", "__"): mostly(9, 16)}),
        rf"{KEYS} in .* has shape \[9, 16\]; this model needs \[8, 16\]",
    ),
    "misshapen": (
        changed(**{GATE.replace(".", "__"): mostly(16, 6)}),
        rf"{GATE} in .* has shape \[16, 6\]; this model needs \[6, 16\]",
    ),
    "extra": (changed(lora__weight=mostly(2, 3)), r"lora\.weight \[2, 3\] in .* has no place"),
    "missing": (
        changed(**{NORM.replace(".", "__"): None}),
        rf"lacks {NORM}, expected with shape \[16\]; missing tensors: 1",
    ),
}

SHARDS: dict[str, tuple[Break, str]] = {
    "missing shard": (removed(SHARD), f"index.json names {SHARD}, which is not there"),
    "shard cut short": (cut(SHARD), f"{SHARD} is broken, cut short"),
    "no index": (removed(INDEX), "00001-of-00003.safetensors and no index"),
    "index without weight_map": (written(INDEX, "{}"), "weight_map in .*index.json is None"),
    "weight_map is no object": (written(INDEX, '{"weight_map": []}'), r"weight_map in .* is \[\]"),
    "index is not JSON": (written(INDEX, "weights"), r"index\.json is not JSON"),
    "file above the folder": (placed(NORM, f"../{SHARD}"), f"has {NORM} in '../{SHARD}', which"),
    "absolute path": (placed(NORM, f"/tmp/{SHARD}"), f"{NORM} in '/tmp/{SHARD}', which is not a"),
    "folder above": (placed(NORM, ".."), f"{NORM} in '..', which is not a file beside it"),
    "no file name": (placed(NORM, 7), f"{NORM} in 7, which is not a file beside it"),
    "empty file name": (placed(NORM, ""), f"{NORM} in '', which is not a file beside it"),
    "long file name": (placed(NORM, "x" * 300), "index.json names xxx.*, which is not there"),
    "tensor that its shard lacks": (placed("a.b", SHARD), f"a.b in {SHARD}, but that file has no"),
}


@pytest.mark.parametrize("case", [*CONFIGS, *TENSORS])
def test_folder_with_one_file(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path, arrays_of(QWEN2))
    write_json(tmp_path / "config.json", QWEN2)
    loads(tmp_path)
    spoil, message = {**CONFIGS, **TENSORS}[case]
    spoil(tmp_path)
    check(tmp_path, message)


@pytest.mark.parametrize("case", SHARDS)
def test_folder_with_shards(tmp_path: Path, case: str) -> None:
    write_shards(tmp_path, arrays_of(QWEN2))
    write_json(tmp_path / "config.json", QWEN2)
    loads(tmp_path)
    spoil, message = SHARDS[case]
    spoil(tmp_path)
    check(tmp_path, message)


class Marker:
    """Unpickling it without a guard makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


BINS: dict[str, str] = {
    "cut short": r"pytorch_model\.bin is broken, cut short",
    "empty": r"pytorch_model\.bin is broken",
    "text": r"pytorch_model\.bin is broken",
    "code in a torch file": r"pytorch_model\.bin asks to run [\w.]+, which is refused",
    "code in a bare pickle": r"pytorch_model\.bin is broken",
    "folder": r"cannot read .*pytorch_model\.bin: Is a directory",
    "misshapen": rf"{NORM} in .*pytorch_model\.bin has shape \[3\]; this model needs \[16\]",
    "whole numbers": rf"{NORM} in .*pytorch_model\.bin is stored as torch\.int8",
    "missing shard": "names absent.bin, which is not there",
    "index without weight_map": "weight_map in .*bin.index.json is None",
    "file above the folder": "'../up.bin', which is not a file beside it",
}


@needs_torch
@pytest.mark.parametrize("case", BINS)
def test_folder_with_pytorch_files(tmp_path: Path, case: str) -> None:
    import torch

    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    write_json(folder / "config.json", QWEN2)
    path, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    tensors: dict[str, Any] = {
        name: torch.from_numpy(one) for name, one in arrays_of(QWEN2).items()
    }
    torch.save(tensors, path)
    loads(folder)
    if case == "cut short":
        path.write_bytes(path.read_bytes()[:-2000])
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif case == "code in a torch file":
        torch.save({**tensors, "more": Marker(marker)}, path)
    elif case == "code in a bare pickle":
        path.write_bytes(pickle.dumps(Marker(marker)))
    elif case == "folder":
        path.unlink()
        path.mkdir()
    elif case == "misshapen":
        torch.save({**tensors, NORM: torch.ones(3)}, path)
    elif case == "whole numbers":
        torch.save({**tensors, NORM: torch.ones(16, dtype=torch.int8)}, path)
    else:
        path.rename(folder / "shard.bin")
        shard = {"missing shard": "absent.bin", "file above the folder": "../up.bin"}.get(case)
        write_json(index, {"weight_map": {NORM: shard}} if shard else {})
    check(folder, BINS[case])
    assert not marker.exists()
    if "code" in case:
        # Without the checks its code does run.
        if "torch" in case:
            torch.load(path, weights_only=False)
        else:
            pickle.loads(path.read_bytes())
        assert marker.exists()
