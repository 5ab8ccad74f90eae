"""The operators that docs/ascend.md lists are those of the compiled graphs."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("ascend_operators", ROOT / "scripts" / "ascend_operators.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def listed() -> set[str]:
    page = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
    table = page.partition("<!-- operators: begin -->")[2].partition("<!-- operators: end -->")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


# Qwen2 has no operator that one of these two has not; the script itself compiles all three.
@pytest.mark.parametrize("family", ["ChatGLM-6B", "ChatGLM2, ChatGLM3, GLM-4"])
def test_every_operator_of_the_graphs_is_listed(script: Any, listed: set[str], family: str) -> None:
    # As few graphs as have them all: one length of prompt, one height of decode step.
    used = script.operators_of(script.families()[family], users=2, seq_length=16)
    assert {"MatMul", "BatchMatMul", "ScatterUpdate", "ScatterNdAdd", "Softmax"} <= used
    assert used <= listed, "run python scripts/ascend_operators.py"


def test_platforms_are_mindspores_own_words(script: Any) -> None:
    assert "Ascend" in script.platforms("MatMul")
    assert "Ascend" in script.platforms("Gather")  # its own text refers to that of ops.gather
    assert script.platforms("NoSuchOperator") == ()


def test_the_table_goes_between_the_markers(script: Any) -> None:
    page = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    found = {"one": {"MatMul"}, "other": {"MatMul", "NoSuchOperator"}}
    new = script.replace_table(page, script.table(found))
    assert new.startswith(f"before\n{script.BEGIN}\n| operator | one | other |")
    assert new.endswith(f"{script.END}\nafter\n")
    assert "| `MatMul` | x | x | Ascend, GPU, CPU |" in new
    assert "| `NoSuchOperator` |  | x | **not stated** |" in new
