"""The compile cache on disk: which graphs the next start reuses, and which not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, cast

import pytest

from glm_multiuser import ConfigError, EngineConfig
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.engine import compile_cache
from glm_multiuser.engine.compile_cache import CompileCache
from glm_multiuser.mindspore_internals import CACHE_ENABLED
from glm_multiuser.models.multi_user import MultiUserModel
from tests.engine.small_model import CAUSAL, MODEL

ROOT = Path(__file__).resolve().parents[2]
SETUP = "causal:2:16"
LOADED = "Use the compilation cache"
"""MindSpore's log message for every graph loaded from the cache."""


def start(folder: object, *setups: str) -> tuple[list[Any], int]:
    """A process of its own -> the answers of each engine, and how many graphs were loaded."""
    child = [sys.executable, "-m", "tests.engine.compile_cache_worker", str(folder), *setups]
    environment = {**os.environ, "GLOG_v": "2"}
    done = subprocess.run(child, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(late == 0 for _, late in told)
    return [heard for heard, _ in told], done.stderr.count(LOADED)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_next_start_loads_every_graph_of_the_same_layout_and_no_other(tmp_path: Path) -> None:
    folder, other = tmp_path / "graphs", "causal:3:16"
    (expected,), loaded = start(folder, SETUP)
    assert loaded == 0
    kept = contents(folder)
    assert len(kept) > 2

    (answers, expected_of_other), loaded = start(folder, SETUP, other)
    assert answers == expected
    assert loaded == len(kept)
    assert kept.items() < contents(folder).items()

    damaged = sorted(contents(folder).keys() - kept.keys())[0]
    content = bytearray(contents(folder)[damaged])
    content[len(content) // 2] ^= 1
    (folder / damaged).write_bytes(content)
    answers, loaded = start(folder, SETUP, other)
    assert answers == [expected, expected_of_other]
    assert len(kept) <= loaded < len(contents(folder))
    assert contents(folder)[damaged] != bytes(content)


@pytest.mark.rare
def test_graphs_of_chatglm_6b(tmp_path: Path) -> None:
    expected, _ = start(tmp_path, "chatglm-6b:4:16")
    answers, loaded = start(tmp_path, "chatglm-6b:4:16")
    assert answers == expected
    assert loaded == len(contents(tmp_path))


@pytest.mark.rare
def test_golden_values_of_loaded_graphs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "glm_multiuser.cli", "selfcheck", "--kernels", "portable"]
    for is_second in (False, True):
        done = subprocess.run(
            [*command, "--compile-cache-dir", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "GLOG_v": "2"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert done.stderr.count(LOADED) == is_second * len(contents(tmp_path))


class Shaped:
    """Of a model, what names of files depend on."""

    def __init__(self, **changes: Any) -> None:
        self.config = replace(CAUSAL, **changes)
        self.backend = PortableBackend.of("float32", "CPU")


ENGINE = EngineConfig(compile_cache_dir="~/graphs", kernels="portable")


def name_of(
    model: Optional[Shaped] = None, engine: EngineConfig = ENGINE, users: int = 8, rows: Any = None
) -> Path:
    shaped = cast(MultiUserModel, model or Shaped())
    path = CompileCache.of(shaped, engine, users, rows or {8: 8}).path("decode 8 users")
    assert path is not None
    return path


def test_a_file_is_named_after_all_that_its_graph_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        name_of(),
        name_of(Shaped(num_layers=3)),
        name_of(Shaped(hidden_size=128)),
        name_of(users=7),
        name_of(rows={8: 9}),
        name_of(engine=replace(ENGINE, seq_length=256)),
        name_of(engine=replace(ENGINE, users_per_cell=2)),
        name_of(engine=replace(ENGINE, prefill_chunk=64)),
        name_of(engine=replace(ENGINE, device_target="Ascend")),
    ]
    for changed in ("own_version", "_digest_of_sources", "soc_version"):
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, changed, lambda: "another")
            names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setattr("mindspore.__version__", "9.9")
        names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setenv("MS_JIT_LEVEL", "O0")
        names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setattr("mindspore.get_context", lambda name: {"jit_level": "O0"})
        names.append(name_of())
    half = Shaped()
    half.backend = PortableBackend.of("float16", "CPU")
    names.append(name_of(half))
    six = Shaped()
    six.config = MODEL  # type: ignore[assignment]
    names.append(name_of(six))
    assert len(set(names)) == len(names)
    assert name_of() == names[0]
    assert names[0].parent == Path.home() / "graphs"


def test_what_graphs_do_not_depend_on_leaves_names_alone() -> None:
    other = replace(ENGINE, max_queue=3, cache_prompt=False, session_memory="1GiB", users=5)
    assert name_of(engine=other) == name_of()


def test_the_compile_cache_of_mindspore_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_ENABLED, "1")
    with pytest.raises(ConfigError, match=r"compile_cache_dir is '~/graphs'.*unset one"):
        name_of()


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        compile_cache.write(file / "a.graph", b"graph")
        assert compile_cache.read(file / "a.graph") is None
    assert "not kept" in caplog.messages[0]
    assert "compiled anew" in caplog.messages[1]


@pytest.mark.parametrize("content", [b"", b"short", b"0" * 40])
def test_a_damaged_file_is_not_read(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.graph"
    path.write_bytes(content)
    assert compile_cache.read(path) is None
    assert "is damaged" in caplog.text
    compile_cache.write(path, b"graph")
    assert compile_cache.read(path) == b"graph"
    assert contents(tmp_path).keys() == {"a.graph"}
    assert path.stat().st_mode & 0o077 == 0
