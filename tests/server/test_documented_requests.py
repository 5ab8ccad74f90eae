"""The Python code in the protocol pages runs unchanged against the real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.process import ROOT, ServerProcess

pytest.importorskip("llguidance", reason="forced calls and schemas need the extra structured")
pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
PATIENCE = 120.0


def programs(page: str) -> list[str]:
    """One for each block; a block without a client goes on from the first."""
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    ours = [block for block in blocks if "MultiUserLLM" not in block]
    return [block if "client = " in block else ours[0] + block for block in ours]


PROGRAMS = [
    (page, program)
    for page in ("openai.md", "structured_output.md", "responses_and_messages.md")
    for program in programs(page)
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        "--checkpoint", "ckpt/glm-tiny", "--checkpoint", "ckpt/chatglm3-tiny"
    ) as one:
        yield one


@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_it_runs(server: ServerProcess, page: str, program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program.replace(ADDRESS, server.url)],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_there_are_some_on_every_page() -> None:
    assert [page for page, _ in PROGRAMS] == [
        *["openai.md"] * 3,
        "structured_output.md",
        *["responses_and_messages.md"] * 2,
    ]
