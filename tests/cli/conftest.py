"""The commands under test, and the models that they run on: a fake one, or the real small one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
from typer.testing import CliRunner

from glm_multiuser.cli import loading
from glm_multiuser.cli.commands import app
from tests.cli.fake import FakeLLM, Params, Stats
from tests.server.process import ROOT

GLM_TINY = ROOT / "ckpt" / "glm-tiny"


def separate_streams() -> CliRunner:
    """A runner that keeps stdout and stderr apart; before click 8.2 that was an option."""
    try:
        return CliRunner(mix_stderr=False)  # type: ignore[call-arg]
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
    """A copy of glm-tiny's folder."""
    folder = tmp_path / "glm-tiny"
    folder.mkdir()
    for path in GLM_TINY.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="package")
def glm_tiny() -> Path:
    """The real small checkpoint."""
    if not (GLM_TINY / "config.json").is_file():
        pytest.skip("ckpt/glm-tiny has no weights here")
    return GLM_TINY


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs `glm-multiuser` with the given words in this process."""

    def invoke(*words: object, stdin: str = "") -> Any:
        return separate_streams().invoke(app, [str(word) for word in words], input=stdin)

    return invoke
