"""`glm-multiuser patch`: what it says, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli.commands import app
from tests.cli.conftest import separate_streams
from tests.mindformers.fake import CONFIG, LAYERS, MODEL, PATCHES, Release, contents

Run = Callable[..., Any]


@pytest.fixture
def run(release: Release, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `glm-multiuser patch` with the patches of the small releases."""
    folder = release.patches.parent
    monkeypatch.setattr("glm_multiuser.mindformers.series.patches_folder", lambda: folder)
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*words: object) -> Any:
        return separate_streams().invoke(app, ["patch", *map(str, words)])

    return invoke


def test_list(run: Run) -> None:
    result = run("--list")
    assert result.exit_code == 0
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line[0] == "│"]
    assert [row[0].strip() for row in rows if row[0].strip()] == ["1.0.0", "2.0.0"]
    assert [row[1].strip() for row in rows if row[1].strip()] == ["1", "2", "3"] * 2
    words = " ".join(" ".join(row[2] for row in rows).split())
    assert all(words.count(subject) == 2 for subject, _ in PATCHES)
    files = [row[3].strip() for row in rows if row[3].strip()]
    assert files == ["glm_config.py", "glm.py", "layers.py", "glm.py"] * 2


def test_check_a_pristine_tree(run: Run, wheel: Path) -> None:
    before = contents(wheel)
    result = run("--check", wheel)
    titles = [f"  {number} {subject}" for number, (subject, _) in enumerate(PATCHES, 1)]
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"MindFormers 2.0.0 at {wheel} is pristine",
        "",
        f"{CONFIG}: +4 -1 lines",
        titles[0],
        "",
        f"{MODEL}: +3 -3 lines",
        titles[1],
        titles[2],
        "",
        f"{LAYERS}: +9 -5 lines",
        titles[1],
    ]
    assert contents(wheel) == before


def test_check_a_partly_patched_tree(run: Run, release: Release, tmp_path: Path) -> None:
    folder = release.copied_to(tmp_path / "wheel", patches=2)
    result = run("--check", folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"MindFormers 2.0.0 at {folder} is partly patched",
        "",
        f"{CONFIG}: all patches are applied",
        "",
        f"{MODEL}: +2 -2 lines, 1 of 2 patches are applied",
        f"  3 {PATCHES[2][0]}",
        "",
        f"{LAYERS}: all patches are applied",
    ]


def test_apply_and_revert_say_what_they_did(run: Run, release: Release, wheel: Path) -> None:
    files = [f"  {path}" for path in (CONFIG, MODEL, LAYERS)]
    heading = f"MindFormers 2.0.0 at {wheel} is"
    for option, state in (("--apply", "patched"), ("--revert", "pristine")):
        first, again = run(option, wheel), run(option, wheel / "mindformers")
        assert (first.exit_code, again.exit_code) == (0, 0)
        assert first.stdout.splitlines() == [
            f"{heading} now {state}; these files were written:",
            *files,
        ]
        assert again.stdout == f"{heading} {state} already; nothing was written\n"
        assert run("--check", wheel).stdout.startswith(f"{heading} {state}\n")
    assert contents(wheel) == contents(release.wheel)


@pytest.mark.parametrize("option", ["--check", "--apply", "--revert"])
def test_a_changed_tree_is_one_line_and_exit_code_2(run: Run, wheel: Path, option: str) -> None:
    (wheel / MODEL).write_text("")
    result = run(option, wheel)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: the MindFormers at {wheel} was changed: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [(), ("--list", "--check", "."), ("--apply", ".", "--revert", ".")]
)
def test_exactly_one_action_is_needed(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "give exactly one of --list, --check PATH, --apply PATH and --revert" in result.stderr


def test_mindspore_is_not_needed(wheel: Path) -> None:
    program = (
        "import sys; from glm_multiuser.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'mindspore', 'mindformers', 'numpy'} & set(sys.modules)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, "patch", "--list"], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert "1.3.2" in child.stdout
