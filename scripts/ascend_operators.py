"""Lists the MindSpore operators in the compiled graphs, and their documented platforms.

    python scripts/ascend_operators.py            writes the table into docs/ascend.md
    python scripts/ascend_operators.py --check    exits with 1 if the table would change

Compiles every graph of a small model of each family as an engine does, in float16 and with the
choices for Ascend, but on a CPU. The operators come from the graphs that MindSpore passes to its
device backend; what an Ascend card makes of them is not visible here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import mindspore
from mindspore import mint, ops
from mindspore.common.api import _cell_graph_executor
from mindspore.train.mind_ir_pb2 import ModelProto

from glm_multiuser import EngineConfig, ModelConfig, device
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model, make_runner
from glm_multiuser.checkpoint.families import FAMILIES
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine import portable
from glm_multiuser.engine.graph_runner import GraphRunner
from glm_multiuser.model_config import AnyModelConfig, CausalConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ascend.md"
BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"

NO_OPERATORS = {"Depend", "Load", "MakeTuple", "Return", "TupleGetItem", "UpdateState"}
"""Nodes for ordering and grouping, without computation."""

DOCUMENTED_AS = {"MeanExt": "mean", "Muls": "mul", "SumExt": "sum"}
"""Operators without their own documentation -> the function of `mindspore.ops` that uses them."""

KERNELS = Path(__file__).resolve().parent / "ascend_dryrun" / "kernels.json"
"""Kernel kinds by operator, from `python -m scripts.ascend_dryrun --write`."""

NO_KERNEL = {"Reshape"}
"""Operators without work on a card."""

BLOCK_LENGTH, SEQ_LENGTH, USERS = 16, 24, 8
"""Two blocks of positions, prompts of two lengths, and decode steps of a few users and of all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = replace_table(old, table({name: operators_of(one) for name, one in families().items()}))
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit(f"{PAGE.name} has another table: run python {Path(__file__).name}")


def families() -> dict[str, AnyModelConfig]:
    """A small model of each family, by the family's title."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "inner_hidden_size": 48,
        "max_sequence_length": 64,
        "eos_token_ids": (2,),
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3, "gmask_token_id": 4}
    neighbours = {**sizes, "rotary_dim": 4, "rotary_interleaved": True}
    halves = {**sizes, "rotary_dim": 8}
    models = {
        "chatglm_6b": ModelConfig(64, 32, 1, 4, 48, pad_token_id=0, **ids),
        "chatglm2": CausalConfig("chatglm2", **neighbours),
        "glm4_0414": CausalConfig("glm4_0414", norm_position="both", **neighbours),
        "llama": CausalConfig("llama", qkv_bias=False, **halves),
        "qwen2": CausalConfig("qwen2", **halves),
        "qwen3": CausalConfig("qwen3", query_key_norm=True, qkv_bias=False, **halves),
    }
    return {family.title: models[name] for name, family in FAMILIES.items()}


def operators_of(
    config: AnyModelConfig, users: int = USERS, seq_length: int = SEQ_LENGTH
) -> set[str]:
    """The operators in all graphs of an engine for this model."""
    return DEVICE_THREAD.call(lambda: _operators_of(config, users, seq_length))


def _operators_of(config: AnyModelConfig, users: int, seq_length: int) -> set[str]:
    engine = EngineConfig(
        users=users,
        seq_length=seq_length,
        batch_invariant=False,  # skips the slow search for padding
        kernels="portable",
        dtype="float16",
    )
    device.configure("CPU", 0)
    model = make_model(config, PortableBackend.of("float16", "Ascend"))
    with patch.object(portable, "BLOCK_LENGTH", BLOCK_LENGTH):
        runner = make_runner(model, engine)
        runner.compile(lambda done, total, what: None)
    found = operators_of_runner(runner)
    runner.close()
    return found


def operators_of_runner(runner: GraphRunner) -> set[str]:
    """The operators in all compiled graphs of a runner."""
    phases = [phase for entry in runner._entries() for phase in entry.compile_cache]
    return set().union(*map(operators_of_graph, phases))


def operators_of_graph(phase: str) -> set[str]:
    """The operators in MindSpore's graph of one phase, and in the graphs it calls.

    Raises:
        RuntimeError: from MindSpore, a node that runs Python.
    """
    executor = _cell_graph_executor._graph_executor
    proto = ModelProto()
    proto.ParseFromString(executor.get_func_graph_proto(phase, "mind_ir", False))
    nodes = [node for graph in (proto.graph, *proto.functions) for node in graph.node]
    # Other nodes are constants and calls.
    names = [re.fullmatch(r"REF::(\w+):\d+", node.op_type) for node in nodes]
    return {name[1] for name in names if name} - NO_OPERATORS


def platforms(operator: str) -> tuple[str, ...]:
    """The platforms that MindSpore documents for an operator; () if undocumented."""
    if operator in DOCUMENTED_AS:
        operator = DOCUMENTED_AS[operator]
        return (*_platforms_in(getattr(ops, operator).__doc__), f"as `ops.{operator}`")
    primitive = getattr(ops.operations, operator, None) or getattr(
        ops.auto_generate, operator, None
    )
    text = primitive.__doc__ or "" if primitive else ""
    named = re.search(r":func:`mindspore\.(ops|mint)\.(\w+)`", text)
    if "Supported Platforms" not in text and named:
        function = getattr({"ops": ops, "mint": mint}[named[1]], named[2], None)
        text = getattr(function, "__doc__", None) or ""
    return _platforms_in(text)


def _platforms_in(text: Optional[str]) -> tuple[str, ...]:
    line = re.search(r"Supported Platforms:\s*(.+)", text or "")
    return tuple(re.findall(r"``([\w ]+)``", line[1])) if line else ()


def table(found: Mapping[str, Iterable[str]]) -> str:
    """Operators as rows, families as columns, and the documented platforms."""
    kernels = json.loads(KERNELS.read_text(encoding="utf-8"))
    lines = [
        f"| operator | {' | '.join(found)} | kernel | documented for |",
        f"| --- | {' | '.join(':---:' for _ in found)} | --- | --- |",
    ]
    for operator in sorted(set().union(*found.values())):
        used = " | ".join("x" if operator in one else "" for one in found.values())
        documented = ", ".join(platforms(operator)) or "**not stated**"
        kernel = "" if operator in NO_KERNEL else kernels.get(operator, "**not found**")
        lines.append(f"| `{operator}` | {used} | {kernel} | {documented} |")
    lines.append("")
    lines.append(f"Graphs and documentation of MindSpore {mindspore.__version__}.")
    return "\n".join(lines)


def replace_table(page: str, text: str) -> str:
    """Replaces the table between the page's markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    main()
