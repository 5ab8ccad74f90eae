"""Every command in the documentation exists in the command line or the Makefile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm_multiuser.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "README_CN.md"]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_ENDS = {"|", ">", ">>", "<", "&", "&&", ";"}


def commands(page: Path, program: str) -> list[list[str]]:
    """The words of every call of a program in the page's blocks of bash."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == [program]:
                end = next((at for at, word in enumerate(words) if word in SHELL_ENDS), len(words))
                found.append(words[1:end])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for words in commands(page, "glm-multiuser"):
        # Words are parsed before --help takes effect: an unknown option is an error.
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, (words, result.output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {target for one in targets for target in one.split()}
    assert {word for words in commands(page, "make") for word in words if "=" not in word} <= known


def test_an_unknown_option_is_seen() -> None:
    assert CliRunner().invoke(app, ["serve", "--no-such-option", "--help"]).exit_code == 2


@pytest.mark.parametrize("program", ["git", "make", "pip", "glm-multiuser"])
def test_both_readmes_have_the_same_commands(program: str) -> None:
    english, chinese = (commands(page, program) for page in READMES)
    assert english
    assert english == chinese
