"""The operators of compiled graphs: docs/ascend.md lists them, and none of them runs Python."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, Optional

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from glm_multiuser import EngineConfig, device
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.backends.protocol import Backend
from glm_multiuser.build import make_model, make_runner
from glm_multiuser.checkpoint.families import FAMILIES
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.model_config import AnyModelConfig
from tests.engine.small_model import CAUSAL, MODEL

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
    if f"of MindSpore {mindspore.__version__}." not in page:
        pytest.skip("docs/ascend.md lists the operators of another version of MindSpore")
    table = page.partition("<!-- operators: begin -->")[2].partition("<!-- operators: end -->")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


# Qwen3 has every operator of the other causal families; the script itself compiles them all.
@pytest.mark.parametrize("family", ["ChatGLM-6B", "Qwen3"])
def test_every_operator_of_the_graphs_is_listed(script: Any, listed: set[str], family: str) -> None:
    # As few graphs as have them all: one length of prompt, one height of decode step.
    used = script.operators_of(script.families()[family], users=2, seq_length=16)
    assert {"MatMul", "BatchMatMul", "ScatterUpdate", "ScatterNdAdd", "Softmax"} <= used
    assert used <= listed, "run python scripts/ascend_operators.py"


def test_every_family_is_listed(script: Any) -> None:
    assert list(script.families()) == [family.title for family in FAMILIES.values()]
    for name, config in zip(FAMILIES, script.families().values()):
        assert config.family == name


MOST_CELLS = dataclasses.replace(CAUSAL, norm_position="both", query_key_norm=True, mlp_bias=True)


@pytest.mark.parametrize("config", [MODEL, MOST_CELLS], ids=["chatglm_6b", "causal"])
@pytest.mark.parametrize(
    ("backend", "users_per_cell"),
    # The portable graphs above have one cell for all users.
    [(NativeBackend(), None), (NativeBackend(), 1), (PortableBackend(), 1)],
    ids=["native", "native, one user in each cell", "portable, one user in each cell"],
)
def test_a_step_never_runs_python(
    script: Any, config: AnyModelConfig, users_per_cell: Optional[int], backend: Backend
) -> None:
    def compiled() -> set[str]:
        """Fails where a graph runs Python."""
        device.configure("CPU", 0)
        engine = EngineConfig(2, 16, users_per_cell=users_per_cell, batch_invariant=False)
        runner = make_runner(make_model(config, backend), engine)
        runner.compile(lambda done, total, what: None)
        found: set[str] = script.operators_of_runner(runner)
        runner.close()
        return found

    expected = {"Custom"} if backend.name == "native" else {"MatMul", "Softmax", "ScatterUpdate"}
    assert expected <= DEVICE_THREAD.call(compiled)


def test_python_would_be_found(script: Any) -> None:
    """In a graph that makes a NamedTuple, which MindSpore has Python do in every run."""

    class Pair(NamedTuple):
        first: Tensor
        second: Tensor

    class Add(nn.Cell):
        def construct(self, pair: Pair) -> Tensor:
            return pair.first + pair.second

    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.add = Add()

        def construct(self, x: Tensor) -> Tensor:
            return self.add(Pair(x, x + 1))

    def compiled() -> None:
        device.configure("CPU", 0)
        cell = Outer()
        cell(Tensor(np.zeros(2, np.float32)))
        (phase,) = cell.compile_cache
        with pytest.raises(RuntimeError, match="PyExecute"):
            script.operators_of_graph(phase)

    DEVICE_THREAD.call(compiled)


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
    assert "| `MatMul` | x | x | aclnn | Ascend, GPU, CPU |" in new
    assert "| `NoSuchOperator` |  | x | **not found** | **not stated** |" in new
