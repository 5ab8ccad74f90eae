"""Broken copies of the shipped checkpoint: each is one CheckpointError, at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm_multiuser import MultiUserLLM
from glm_multiuser.errors import CheckpointError
from tests.server.process import ROOT

GLM_TINY = ROOT / "ckpt" / "glm-tiny"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "ice_text.model"
LAST = "transformer.layers.3.mlp.dense_4h_to_h.bias"
SECONDS = 10.0
"""Generous: making the model of a folder whose values are wrong is the longest."""

Break = Callable[[Path], object]


def changed(**changes: Any) -> Break:
    """Other values in config.json; ... takes one away."""

    def change(folder: Path) -> None:
        values = {**json.loads((GLM_TINY / CONFIG).read_text()), **changes}
        left = {name: one for name, one in values.items() if one is not ...}
        replaced(CONFIG, json.dumps(left).encode())(folder)

    return change


def replaced(name: str, content: bytes) -> Break:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)  # it is a link to the shipped one
        (folder / name).write_bytes(content)

    return replace


def pipe(name: str) -> Break:
    """Has no writer, so opening it blocks."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def linked(name: str, target: str) -> Break:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return link


def emptied(name: str) -> Break:
    """A folder in its place."""

    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def cut(name: str) -> Break:
    return lambda folder: replaced(name, (GLM_TINY / name).read_bytes()[:-100])(folder)


def tensors(change: Callable[[dict[str, Any]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        arrays = load_file(GLM_TINY / WEIGHTS)
        change(arrays)
        (folder / WEIGHTS).unlink()
        save_file(arrays, folder / WEIGHTS)

    return rewrite


def with_value(value: float) -> Break:
    """In the last number of a tensor in the last layer."""
    return tensors(lambda arrays: arrays[LAST].__setitem__(-1, value))


def sharded_pipe(folder: Path) -> None:
    names = load_file(GLM_TINY / WEIGHTS)
    (folder / WEIGHTS).unlink()
    index = {"weight_map": dict.fromkeys(names, "shard.safetensors")}
    replaced(f"{WEIGHTS}.index.json", json.dumps(index).encode())(folder)
    pipe("shard.safetensors")(folder)


SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "inner_hidden_size")
NO_SIZES: dict[str, Any] = {
    "of a thousand million": 10**9,
    "beyond all memory": 10**12,
    "with a point": 1e9,
    "below zero": -1,
    "as text": "4",
    "as a list": [4],
}
CONFIGS: dict[str, tuple[Break, str]] = {
    **{
        f"{name} {what}": (changed(**{name: value}), f"{name} is ")
        for name in SIZES
        for what, value in NO_SIZES.items()
    },
    "max_sequence_length": (changed(max_sequence_length=10**12), "max_sequence_length is 1000"),
    "a number of 400 digits": (changed(hidden_size=10**400), "hidden_size is 1000"),
    "true layers": (changed(num_layers=True), "num_layers is True"),
    "no layers": (changed(num_layers=...), "lacks a size of the model"),
    "one layer more": (changed(num_layers=5), r"lacks transformer\.layers\.4"),
    "one layer less": (changed(num_layers=3), r"transformer\.layers\.3.* has no place"),
    "odd width": (changed(hidden_size=257), "hidden_size 257 cannot be split"),
    "another vocabulary": (changed(vocab_size=2049), r"has shape \[2048, 256\]"),
    "enormous and possible": (
        changed(hidden_size=1 << 24, inner_hidden_size=1 << 24, num_layers=1024),
        "this model needs",
    ),
    "negative epsilon": (changed(layernorm_epsilon=-1e-5), "layernorm_epsilon is -1e-05"),
    "zero epsilon": (changed(layernorm_epsilon=0), "layernorm_epsilon is 0"),
    "NaN epsilon": (changed(layernorm_epsilon=float("nan")), "layernorm_epsilon is nan"),
    "endless epsilon": (changed(layernorm_epsilon=float("inf")), "layernorm_epsilon is inf"),
    "epsilon as text": (changed(layernorm_epsilon="1e-5"), "layernorm_epsilon is '1e-5'"),
    "eos as text": (changed(eos_token_id="x"), "eos_token_id is 'x'"),
    "eos below zero": (changed(eos_token_id=-1), "eos_token_id is -1"),
    "eos beyond the vocabulary": (changed(eos_token_id=2048), "eos_token_id is 2048"),
    "eos as a list": (changed(eos_token_id=[9]), r"eos_token_id is \[9\]"),
    "gmask beyond": (changed(gmask_token_id=10**9), "gmask_token_id is 1000000000"),
    "no mask": (changed(mask_token_id=None), "mask_token_id is None"),
    "deepnorm": (changed(deepnorm_layers=-1), "deepnorm_layers is -1"),
    "quantised": (changed(quantization_bit=4), "quantization_bit is 4"),
    "unknown model": (changed(model_type="mamba"), "model_type 'mamba'"),
    "not there": (lambda folder: (folder / CONFIG).unlink(), "cannot read"),
    "empty": (replaced(CONFIG, b""), "is not JSON"),
    "not JSON": (replaced(CONFIG, b"{'a': 1}"), "is not JSON"),
    "not UTF-8": (replaced(CONFIG, b'{"a": "\xff"}'), "is not JSON"),
    "a list": (replaced(CONFIG, b"[]"), "holds list"),
    "nested": (replaced(CONFIG, b"[" * 100000), "is not JSON"),
    "pipe": (pipe(CONFIG), "is no regular file"),
    "folder": (emptied(CONFIG), "cannot read"),
}
FILES: dict[str, tuple[Break, str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights in"),
    "link to nothing": (linked(WEIGHTS, "nothing"), "no weights in"),
    "empty": (replaced(WEIGHTS, b""), "is broken"),
    "header without end": (replaced(WEIGHTS, b"\xff" * 64), "is broken"),
    "cut short": (cut(WEIGHTS), "is broken"),
    "pipe": (pipe(WEIGHTS), "is no regular file"),
    "device": (linked(WEIGHTS, "/dev/zero"), "is no regular file"),
    "folder": (emptied(WEIGHTS), "cannot read"),
    "pipe as a shard": (sharded_pipe, "shard.safetensors is no regular file"),
    "NaN": (with_value(float("nan")), f"{LAST} in .* has values that are not finite"),
    "infinite": (with_value(float("inf")), f"{LAST} in .* has values that are not finite"),
    "minus infinite": (with_value(-float("inf")), f"{LAST} in .* has values that are not finite"),
    "one tensor less": (tensors(lambda arrays: arrays.pop(LAST)), f"lacks {LAST}"),
    "one tensor more": (
        tensors(lambda arrays: arrays.update(lora=np.ones(3, np.float16))),
        r"lora \[3\] in .* has no place",
    ),
    "whole numbers": (
        tensors(lambda arrays: arrays.update({LAST: np.ones(256, np.int8)})),
        "is stored as I8",
    ),
    "vocabulary as a pipe": (pipe(TOKENIZER), "is no regular file"),
    "empty vocabulary": (replaced(TOKENIZER, b""), TOKENIZER),
    "vocabulary of another kind": (replaced(TOKENIZER, b"\x80" * 999), TOKENIZER),
    "settings of the tokenizer": (replaced("tokenizer_config.json", b"[]"), "holds list"),
    "settings as a pipe": (pipe("generation_config.json"), "is no regular file"),
    "temperature as text": (
        replaced("generation_config.json", b'{"temperature": "x"}'),
        "temperature in .* is 'x'",
    ),
    "temperature below zero": (
        replaced("generation_config.json", b'{"temperature": -1}'),
        "generation_config.json in .*: temperature is -1",
    ),
}


CASES = {
    **{f"config.json: {name}": case for name, case in CONFIGS.items()},
    **{f"file: {name}": case for name, case in FILES.items()},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_one_error_at_once(tmp_path: Path, case: str) -> None:
    for path in GLM_TINY.iterdir():
        (tmp_path / path.name).symlink_to(path)
    spoil, message = CASES[case]
    spoil(tmp_path)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as caught:
        MultiUserLLM.from_pretrained(tmp_path, users=1, seq_length=32)
    assert time.monotonic() - begun < SECONDS
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
