"""GGUF files wherever a checkpoint is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli.loading import check_engine, find_checkpoint
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.server.settings import model_settings
from tests.checkpoint.gguf_content import gguf_model

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


def test_convert_refuses_it(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("convert", MODEL, tmp_path / "new")
    assert result.exit_code == 2
    assert "is a GGUF model; it is loaded as it is, not converted" in result.stderr
    assert not (tmp_path / "new").exists()


def test_plan(run: Callable[..., Any]) -> None:
    result = run("plan", "--model", MODEL, "--device-memory", "1GiB", "--seq-length", "64")
    assert result.exit_code == 0, result.output
    assert "384 B" in result.stdout  # a token in float16: 2 layers, 2 heads of 24, keys and values
