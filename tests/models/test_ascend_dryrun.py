"""Graphs for Ascend, compiled without a card: how a log is read, and the dry run itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.ascend_dryrun import kernels, log, stubs

ROOT = Path(__file__).resolve().parents[2]

SELECT = "[INFO] DEVICE(1,7f,python):2026-11-23-15:29:41.011.338 [kernel_select_ascend.cc:729] X] "
EXECUTOR = "[INFO] DEVICE(1,7f,python):2026-11-23-15:29:43.1 [ascend_kernel_executor.cc:288] X] "
GE = "[ERROR] GE_ADPT(1,7f,python):2026-11-23-15:34:16.351.975 [convert.cc:4266] ConvertCNode] "
GOOD = f"{SELECT}MatMul select aclnn kernel\n{SELECT}Gather select aclop kernel\n"


def test_kernels_of_the_card_are_no_problem() -> None:
    assert log.read(GOOD) == log.Findings({"MatMul": "aclnn", "Gather": "aclop"}, [])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"{SELECT}Unique select aicpu kernel", "Unique gets a kernel of aicpu"),
        (
            f"{EXECUTOR}node is Default/LayerNorm-op0 should backoff",
            "Default/LayerNorm-op0 falls back to the CPU",
        ),
        (
            f"{GE}Cannot get adapter for Default/Narrow-op0",
            "Default/Narrow-op0 has no adapter for GE",
        ),
    ],
)
def test_whatever_else_runs_an_operator_is_a_problem(line: str, problem: str) -> None:
    found = log.read(f"{GOOD}{line}\n{line}\n")
    assert found.problems == [problem]
    assert found.kernels == {"MatMul": "aclnn", "Gather": "aclop"}


def test_a_stub_is_a_function_of_its_name() -> None:
    names = {"aclrtMalloc", "aclCreateDataBuffer", "_ZN2ge8Operator8SetInputEv"}
    groups = [part.split() for part in stubs.assembly_of(names).split(".globl ")[1:]]
    codes = {words[0]: " ".join(words[5:]) for words in groups}
    assert codes == {
        "aclrtMalloc": stubs.CODE["zero"],
        "aclCreateDataBuffer": stubs.CODE["object"],
        "_ZN2ge8Operator8SetInputEv": stubs.CODE["itself"],
    }


def test_a_kernel_that_is_not_the_recorded_one_is_a_difference() -> None:
    kept = {"Gather": "aclop", "MatMul": "aclnn"}
    found = kernels.of([{"MatMul": "aclnn"}, {"MatMul": "aclop", "Add": "aclnn"}])
    assert found == {"Add": "aclnn", "MatMul": "aclnn, aclop"}
    changed = [
        "Add: the kernel is aclnn, recorded is none",
        "MatMul: the kernel is aclnn, aclop, recorded is aclnn",
    ]
    assert kernels.differences(found, kept, is_part=True) == changed
    gone = "Gather: the kernel is none, recorded is aclop"
    assert kernels.differences(found, kept, is_part=False) == [changed[0], gone, changed[1]]
    assert kernels.differences(kept, kept, is_part=False) == []


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not all(map(shutil.which, ("g++", "nm"))):
        pytest.skip("there is no g++ or no nm to build the stubs with")
    command = [sys.executable, "-m", "scripts.ascend_dryrun", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.rare
@pytest.mark.timeout(3600)
def test_an_operator_without_a_kernel_in_the_portable_backend_fails() -> None:
    result = dry_run("--family", "Qwen3", "--soc", "ascend910b", "--broken")
    assert result.returncode == 1
    assert "ascend910b O0: what must be noticed is noticed" in result.stdout
    assert "1 of 1 have problems" in result.stderr
    reason = "needs to be supplemented with an adapter.*Invented-op"
    for graph in ("prefill", "decode"):
        assert re.search(f"ascend910b O0 Qwen3: .*{graph}.*{reason}", result.stdout)


@pytest.mark.rare
@pytest.mark.timeout(3 * 3600)
def test_every_graph_gets_a_kernel_of_the_card() -> None:
    result = dry_run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every operator has a kernel for the card" in result.stdout
