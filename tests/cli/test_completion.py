"""Completion in shells: typer's own protocol, and the script of bash in a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.cli.commands import app
from tests.cli.conftest import separate_streams

PROTOCOLS = {
    "bash": lambda words: {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": words},
    "fish": lambda words: {
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}

COMPLETE_IN_BASH = """
eval "$(_GLM_MULTIUSER_COMPLETE=source_bash glm-multiuser)"
COMP_WORDS=(glm-multiuser plan --model qwen2.5)
COMP_CWORD=3
_glm_multiuser_completion glm-multiuser
printf '%s ' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", PROTOCOLS)
@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("glm-multiuser pl", "plan", "serve"),
        ("glm-multiuser plan --model qwen2.5", "qwen2.5-14b", "chatglm-6b"),
        ("glm-multiuser plan --device 9", "910A", "CPU"),
        ("glm-multiuser serve --kernels n", "native", "portable"),
    ],
)
def test_what_is_offered(shell: str, words: str, offered: str, not_offered: str) -> None:
    variables = {"_GLM_MULTIUSER_COMPLETE": f"complete_{shell}", **PROTOCOLS[shell](words)}
    result = separate_streams().invoke(app, [], env=variables, prog_name="glm-multiuser")
    assert result.exit_code == 0, result.output
    assert offered in result.stdout
    assert not_offered not in result.stdout


def test_the_script_completes_in_bash(tmp_path: Path) -> None:
    command = tmp_path / "glm-multiuser"
    main = "import sys; sys.argv[0] = 'glm-multiuser'; from glm_multiuser.cli import main; main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{main}" "$@"\n')
    command.chmod(0o755)
    script = f"PATH={tmp_path}:$PATH\n{COMPLETE_IN_BASH}"
    child = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert child.stdout.split() == ["qwen2.5-3b", "qwen2.5-14b", "qwen2.5-32b"], child.stderr
