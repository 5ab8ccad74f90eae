"""A process of the dry run: every graph of one family in several layouts, for one card type.

stdout has one line of JSON per graph, stderr has MindSpore's log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from pathlib import Path
from unittest.mock import patch

from mindspore import ops

from glm_multiuser import EngineConfig
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model, make_runner
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.model_config import AnyModelConfig
from scripts.ascend_dryrun import stubs
from scripts.ascend_dryrun.invented import Invented
from scripts.ascend_operators import families

NO_SESSION = "Can not found GraphRunner"
"""With O2, every graph fails with this after its conversion, because there is no GE session."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stubs", type=Path)
    parser.add_argument("soc")
    parser.add_argument("jit_level")
    parser.add_argument("family", choices=families())
    parser.add_argument("layouts", nargs="+", help="users:users_per_cell:seq_length")
    parser.add_argument("--broken", action="store_true", help="no device has their softmax")
    arguments = parser.parse_args()
    DEVICE_THREAD.call(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    stubs.start(arguments.stubs, arguments.soc, arguments.jit_level)
    config = families()[arguments.family]
    broken = patch.object(ops, "Softmax", Invented) if arguments.broken else None
    with broken or contextlib.nullcontext():
        for layout in arguments.layouts:
            users, per_cell, seq_length = map(int, layout.split(":"))
            compile_graphs(config, users, per_cell, seq_length, arguments.jit_level == "O2")


def compile_graphs(
    config: AnyModelConfig, users: int, per_cell: int, seq_length: int, is_converted: bool
) -> None:
    """Compiles every graph of an engine and walks through it; the values are meaningless."""
    engine = EngineConfig(
        users=users,
        users_per_cell=per_cell,
        seq_length=seq_length,
        device_target="Ascend",
        dtype="float16",
        batch_invariant=False,
    )
    model = make_model(config, PortableBackend.of("float16", "Ascend"))
    runner = make_runner(model, engine)
    for what, job in runner._jobs():
        started = time.monotonic()
        problem = ""
        try:
            job()
        except Exception as error:
            problem = "" if is_converted and NO_SESSION in str(error) else one_line(error)
        seconds = round(time.monotonic() - started, 2)
        layout = f"{users} users, {per_cell} per cell, {seq_length} tokens"
        graph = {"layout": layout, "graph": what, "seconds": seconds, "problem": problem}
        print(json.dumps(graph), flush=True)
    runner.close()


def one_line(error: Exception) -> str:
    """MindSpore's message without its stack trace."""
    text, _, _ = str(error).partition("C++ Call Stack")
    return f"{type(error).__name__}: " + re.sub(r"[\s-]*\n[\s-]*", " ", text).strip(" |-")


if __name__ == "__main__":
    main()
