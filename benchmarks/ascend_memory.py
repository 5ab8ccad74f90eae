"""Compares `glm-multiuser plan` for a 910A with the memory that a simulated one allocates.

    python -m benchmarks.ascend_memory [--model chatglm3-6b] [--quick] [--every-graph]

Each setup runs in its own process: a model of published width and few layers is built for an Ascend
card that MindSpore simulates (scripts/ascend_dryrun), and its largest graphs are walked through, or
all with --every-graph: what stays allocated then includes the constants of all graphs.
Measures the peak of MindSpore's allocator beside what stays. A card may need more: CANN
determines the kernels' workspaces, and the stubs report 0. Prints one line of JSON at the end; the
exit code is 1 if a plan is more than 15 % off from what a graph takes while it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm_multiuser import EngineConfig, memory
from glm_multiuser.backends.cell_layout import BLOCK_LENGTH
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model, make_runner
from glm_multiuser.cli.published import PUBLISHED
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.model_config import AnyModelConfig, CausalConfig
from scripts.ascend_dryrun import stubs

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.15
LAYERS, USERS, LENGTHS = (2, 4), (8, 32), (1024, 2048)
MIB = 2**20


def causal(family: str, *shape: int) -> CausalConfig:
    """A shape without a name in `plan`."""
    vocab_size, hidden_size, heads, kv_heads, head_dim, inner_hidden_size, rotary_dim = shape
    return CausalConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        inner_hidden_size=inner_hidden_size,
        max_sequence_length=2048,
        eos_token_ids=(2,),
        rotary_dim=rotary_dim,
        qkv_bias=False,
    )


MODELS: dict[str, AnyModelConfig] = {
    "chatglm-6b": PUBLISHED["chatglm-6b"],
    "chatglm3-6b": PUBLISHED["chatglm3-6b"],
    "glm-4-9b-0414": replace(
        causal("glm4_0414", 151552, 4096, 32, 2, 128, 13696, 64),
        rotary_interleaved=True,
        norm_position="both",
        qkv_bias=True,
    ),
    "tinyllama-1.1b": causal("llama", 32000, 2048, 32, 4, 64, 5632, 64),
    "qwen2-1.5b": PUBLISHED["qwen2-1.5b"],
    "qwen3-0.6b": replace(
        causal("qwen3", 151936, 1024, 16, 8, 128, 3072, 128), tied=True, query_key_norm=True
    ),
}
"""One model per family, of published width."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--quick", action="store_true", help="one setup of each model")
    parser.add_argument("--every-graph", action="store_true", help="also the small ones")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, model, *numbers = options.child
        setup = (model, *map(int, numbers))
        print(json.dumps(DEVICE_THREAD.call(lambda: measure(Path(folder), *setup))))
        return
    numbers = [(2, 8, 1024)] if options.quick else itertools.product(LAYERS, USERS, LENGTHS)
    setups = list(itertools.product(options.model or MODELS, numbers))
    print("model            layers users tokens   stays: plan   seen   a step: plan   seen   (MiB)")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        libraries = stubs.build(Path(folder))
        for model, (layers, users, length) in setups:
            run = start(libraries, model, layers, users, length, int(options.every_graph))
            runs.append(run)
            print(
                f"{model:16} {layers:6} {users:5} {length:6} {run['held'] / MIB:13,.0f} "
                f"{run['held_seen'] / MIB:6,.0f} {run['step'] / MIB:14,.1f} "
                f"{run['step_seen'] / MIB:6,.1f}   {run['largest']}",
                flush=True,
            )
    print(json.dumps({"runs": runs}))
    if any(abs(run["step"] / run["step_seen"] - 1) > LIMIT for run in runs):
        sys.exit(1)


def start(libraries: Path, *setup: Any) -> dict[str, Any]:
    """Runs one setup in its own process."""
    child = ["--child", str(libraries), *map(str, setup)]
    environment = stubs.environment(libraries, PYTHONPATH=str(ROOT), GLOG_v="3")
    environment.pop("MS_SUBMODULE_LOG_v")
    with tempfile.TemporaryDirectory() as work:  # MindSpore writes files where it is started
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.ascend_memory", *child],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    run: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return run


def measure(
    folder: Path, model: str, layers: int, users: int, length: int, every: int
) -> dict[str, Any]:
    """Planned and allocated bytes."""
    import mindspore as ms

    from glm_multiuser.engine.portable import PortableRunner
    from glm_multiuser.engine.portable_graphs import empty_block

    stubs.start(folder, "ascend910", "O0")
    config = replace(MODELS[model], num_layers=layers)
    engine = EngineConfig(
        users, length, device_target="Ascend", dtype="float16", batch_invariant=False
    )
    runner = make_runner(make_model(config, PortableBackend.of("float16", "Ascend")), engine)
    assert isinstance(runner, PortableRunner)
    jobs = dict(runner._jobs())
    # As for a user who was paused during a resize; it uses the graph of "clear block 0".
    jobs["restore block 0"] = lambda: runner._replace(
        0, 0, empty_block(runner.model, min(BLOCK_LENGTH, length))
    )
    prompts = [what for what in jobs if what.startswith("prefill")]
    decodes = [what for what in jobs if what.startswith("decode")]
    positions = decodes[-1].partition(", ")[2]
    largest = [what for what in decodes if what.endswith(f", {positions}")]
    jobs[prompts[-1]]()  # puts weights and caches on the card
    jobs["clear block 0"]()  # and the zeros, which all blocks of these lengths share
    held = ms.runtime.memory_allocated()
    seen: dict[str, int] = {}
    for what in jobs if every else (prompts[-1], "restore block 0", *largest):
        jobs[what]()  # puts its constants on the card
        before = ms.runtime.memory_allocated()
        ms.runtime.reset_max_memory_allocated()
        jobs[what]()
        seen[what] = ms.runtime.max_memory_allocated() - before
    constants = 0
    if every:
        held, constants = ms.runtime.memory_allocated(), memory.constant_bytes(config, engine)
    most = max(seen, key=seen.__getitem__)
    runner.close()
    return {
        **{"model": model, "layers": layers, "users": users, "seq_length": length},
        "held": memory.total_bytes(config, engine) + constants,
        "held_seen": held,
        "step": memory.step_bytes(config, engine),
        "step_seen": seen[most],
        "largest": most,
        "seen": seen,
    }


if __name__ == "__main__":
    main()
