"""The commands under test: with the fake model, and with the real small one where it exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable

import pytest
from typer.testing import CliRunner

from glm_multiuser.cli import app, loading
from tests.cli.fake import FakeLLM, Params, Stats

GLM_TINY = loading.CHECKOUT / "ckpt" / "glm-tiny"


def separate_streams() -> CliRunner:
    """A runner that keeps stdout and stderr apart; before click 8.2 that was an option."""
    try:
        return CliRunner(mix_stderr=False)
    except TypeError:
        return CliRunner()


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Every command opens a `FakeLLM`; the list `opened` begins empty."""
    monkeypatch.setattr(FakeLLM, "opened", [])
    monkeypatch.setattr(FakeLLM, "final_stats", Stats())
    monkeypatch.setattr(loading, "llm_class", lambda: FakeLLM)
    monkeypatch.setattr(loading, "sampling_params", Params)
    return FakeLLM


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that looks like glm-tiny's to the commands."""
    folder = tmp_path / "glm-tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="package")
def glm_tiny() -> Path:
    """The real small checkpoint."""
    if not (GLM_TINY / "config.json").is_file():
        pytest.skip("ckpt/glm-tiny has no weights here")
    return GLM_TINY


@pytest.fixture(scope="package")
def compiled_llm(glm_tiny: Path) -> Iterator[Any]:
    """The real small model, compiled once for all tests that only need it running."""
    with loading.llm_class().from_pretrained(glm_tiny, users=3) as llm:
        yield llm


@pytest.fixture
def real_llm(compiled_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every command uses the model that is already there, and leaves it open."""
    monkeypatch.setattr(loading, "open_llm", lambda *_, **__: nullcontext(compiled_llm))
    return compiled_llm


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs `glm-multiuser` with the given words in this process."""

    def invoke(*words: object, stdin: str = "") -> Any:
        return separate_streams().invoke(app, [str(word) for word in words], input=stdin)

    return invoke
