"""The wheel: every command works where there is nothing but it and what it requires."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from glm_multiuser.cli.serve import DEFAULT_PORT
from glm_multiuser.package_data import FOLDERS
from tests.deploy import compose, dockerfile, unit
from tests.packaging.environment import VARIABLES, Installed, run
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow

MAX_BYTES = 20_000_000

SIZES = ("--users", "2", "--seq-length", "128")
QUESTION = "你好"


def test_the_archive_has_no_tests(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        names = [name.partition("/")[2] for name in packed.getnames()]
    assert "tests/golden/chatglm_6b_3layers/expected.json" in names
    assert "glm_multiuser/backends/native/cpu/program.cpp" in names
    assert [name for name in names if name.startswith("tests/") and name.endswith(".py")] == []


def test_the_wheel_is_small_and_for_many_systems(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_BYTES
    found = re.fullmatch(
        r"glm_multiuser-[\d.]+-py3-none-(manylinux_2_\d+_\w+?)(\.manylinux\w+)*\.whl", wheel.name
    )
    assert found
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, folder=wheel.parent).stdout
    assert f'following platform tag: "{found[1]}"' in " ".join(shown.split())


def test_nothing_comes_from_the_checkout(installed: Installed) -> None:
    program = "from glm_multiuser import package_data as p; print(p.__file__, p.ROOT, sep='\\n')"
    file, root = installed.python("-c", program).splitlines()
    assert Path(file).parent == installed.data.parent
    assert Path(root) == installed.data
    assert all((installed.data / folder).is_dir() for folder in FOLDERS)


def test_demo(installed: Installed) -> None:
    result = installed("demo", *SIZES, "--max-tokens", "8")
    assert "2 of 2 answers are identical" in result.stdout
    assert f"loading {installed.data}/ckpt/glm-tiny" in result.stderr


def test_selfcheck(installed: Installed) -> None:
    result = installed("selfcheck", "--kernels", "native")
    checks = [line.split()[0] for line in result.stderr.splitlines() if line.endswith(" s)")]
    assert checks == ["ok"] * 7, result.stderr
    assert f"loading {installed.data}/tests/golden/" in result.stderr


def test_plan(installed: Installed) -> None:
    assert "users" in installed("plan", "--model", "ckpt/glm-tiny", "--device", "CPU").stdout


def test_patch_list(installed: Installed) -> None:
    assert "1.3.2" in installed("patch", "--list").stdout


def in_container(arguments: list[str]) -> list[str]:
    return [*dockerfile.entrypoint(), *arguments]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(in_container(*dockerfile.commands("CMD")), id="Dockerfile"),
        pytest.param(in_container(compose.services()[compose.SERVER]["command"]), id="compose"),
        pytest.param(unit.exec_start("", "--users 2 --seq-length 128"), id="systemd"),
    ],
)
def test_serve(installed: Installed, command: list[str]) -> None:
    """Each on the loopback interface, until SIGTERM."""
    program, *arguments = command
    assert Path(program).name == installed.command.name
    with ServerProcess(
        *(*arguments[1:], "--host", "127.0.0.1", "--port", "0"),
        command=(str(installed.command), "serve"),
        environment=VARIABLES,
        folder=installed.folder,
    ) as server:
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        reply = post(f"{server.url}/v1/chat/completions", body)
        assert reply["model"] == "glm-tiny"
        assert reply["choices"][0]["message"]["content"]
        assert health_check(installed, server.port) == 0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert health_check(installed, server.port) == 1


def health_check(installed: Installed, port: int) -> int:
    """The exit code of what Docker runs every few seconds."""
    ((_, *arguments),) = dockerfile.commands("HEALTHCHECK")
    python = installed.environment / "bin" / "python"
    words = [word.replace(str(DEFAULT_PORT), str(port)) for word in arguments]
    return subprocess.run([str(python), *words], stderr=subprocess.DEVNULL).returncode


def test_serve_with_triton(installed: Installed) -> None:
    find = "import importlib.util; print(bool(importlib.util.find_spec('pytriton')))"
    if installed.python("-c", find).strip() != "True":
        pytest.skip("needs pip install 'glm-multiuser[triton]'")
    command = (str(installed.command), "serve", "--backend", "triton")
    with ServerProcess(
        *SIZES, command=command, environment=VARIABLES, folder=installed.folder
    ) as server:
        reply = post(f"{server.url}/v2/models/chatglm/generate", {"prompt": QUESTION})
        assert reply["response"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def post(url: str, body: object) -> Any:
    """The JSON of a reply."""
    content = {"content-type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), content), timeout=60) as reply:
        return json.load(reply)
