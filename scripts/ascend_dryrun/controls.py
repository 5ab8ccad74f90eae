"""Controls of the dry run: operators that must be rejected, and one that must pass.

stdout has one line of JSON per control, stderr has MindSpore's log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.device_thread import DEVICE_THREAD
from scripts.ascend_dryrun import stubs
from scripts.ascend_dryrun.graphs import NO_SESSION, one_line
from scripts.ascend_dryrun.invented import Invented


class Calls(nn.Cell):
    """A graph of one operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, *inputs: Any) -> Any:
        return self.operator(*inputs)


class Updates(nn.Cell):
    """A graph that writes rows of a Parameter."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.past = Parameter(Tensor(np.zeros((8, 4), dtype)), name="past")
        self.update = ops.ScatterUpdate()

    def construct(self, rows: Any, values: Any) -> Any:
        return self.update(self.past, rows, values)


def accepted() -> None:
    Calls(ops.Softmax())(ones(4, 8)).asnumpy()


def invented() -> None:
    Calls(Invented())(ones(4, 8)).asnumpy()


def refused_type() -> None:
    rows, values = Tensor(np.arange(3), ms.int32), ones(3, 4, dtype=np.complex64)
    Updates(np.complex64)(rows, values).asnumpy()


def fallback() -> None:
    vector = ones(16, dtype=np.float64)
    norm = Calls(ops.LayerNorm(begin_norm_axis=1, begin_params_axis=1))
    norm(ones(4, 16, dtype=np.float64), vector, vector)[0].asnumpy()


def ones(*shape: int, dtype: Any = np.float16) -> Tensor:
    return Tensor(np.ones(shape, dtype))


CONTROLS: dict[str, dict[str, tuple[Callable[[], None], str]]] = {
    "O0": {
        "an operator that is there": (accepted, ""),
        "an invented operator": (invented, "needs to be supplemented with an adapter"),
        "a type that is refused": (refused_type, "supported input and output data types"),
        "a fallback to the CPU": (fallback, "LayerNorm-op0 falls back to the CPU"),
    },
    "O2": {
        "an operator that is there": (accepted, ""),
        "an operator without an adapter": (invented, "Invented-op0 has no adapter for GE"),
    },
}
"""By `jit_level` and name: a graph, and part of the problem that must be found; "" for none."""


def main() -> None:
    folder, soc, jit_level = sys.argv[1:]
    DEVICE_THREAD.call(lambda: run(Path(folder), soc, jit_level))


def run(folder: Path, soc: str, jit_level: str) -> None:
    stubs.start(folder, soc, jit_level)
    for name, (graph, _) in CONTROLS[jit_level].items():
        problem = ""
        try:
            graph()
        except Exception as error:
            converted = jit_level == "O2" and NO_SESSION in str(error)
            problem = "" if converted else one_line(error)
        print(json.dumps({"control": name, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
