"""Measures resident memory when cache capacity far exceeds the cached tokens.

    python benchmarks/memory.py [--users 64] [--seq-length 8192] [--busy 8] [--tokens 500]

A random model of Qwen2's kind in bfloat16, with float32 caches, runs in its own process with
`--users` slots. `--busy` users concurrently reach about `--tokens` tokens, prompt and answer
together; then all of them end. The last line is JSON. The exit code is 1 if one of these does not
hold; all are resident sets (VmRSS), `imported` with only MindSpore imported:

    busy - imported <= weights + 1.25 * bytes of the tokens that are held + 150 MB
    ended <= 1.05 * ready
    most until ready (VmHWM) <= 1.1 * ready
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_multiuser import EngineConfig, MultiUserLLM, SamplingParams, backend_choice, memory
from glm_multiuser.cli.conditions import machine
from glm_multiuser.cli.measure import fields
from glm_multiuser.engine.step_loop import StepReport
from glm_multiuser.model_config import CausalConfig

MODEL = CausalConfig(
    family="qwen2",
    vocab_size=16384,
    hidden_size=1024,
    num_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    inner_hidden_size=4096,
    max_sequence_length=32768,
    eos_token_ids=(2,),
    rotary_dim=64,
)
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run = json.loads(child.stdout.splitlines()[-1])
    held = run["weights"] + 1.25 * run["token_bytes"] + 150e6
    ratios = {
        "busy": (run["busy"] - run["imported"]) / held,
        "ended": run["ended"] / (1.05 * run["ready"]),
        "starting": run["starting"] / (1.1 * run["ready"]),
    }
    for name, value in run.items():
        print(f"{name:18} {value / 1e6:10.1f} MB" if value > 10000 else f"{name:18} {value:10}")
    for name, ratio in ratios.items():
        print(f"{name:8} {ratio:6.3f} of what it may be")
    print(json.dumps({"conditions": machine(), **run, "of_what_it_may_be": ratios}))
    if max(ratios.values()) > 1:
        sys.exit(1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """This process, in bytes."""
    settings: dict[str, Any] = {
        "users": options.users,
        "seq_length": options.seq_length,
        "kernels": "native",
        "weight_dtype": "bfloat16",
        "cache_dtype": "float32",
    }
    engine = EngineConfig(**settings)
    imported = resident()
    length = options.tokens - NEW_TOKENS // 2
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with MultiUserLLM.from_config(MODEL, **settings) as llm:
        ready, starting = resident(), status()["VmHWM"] * 1024
        held: dict[str, int] = {"caches": 0}

        def look(report: StepReport) -> None:
            """The step with the most cached tokens."""
            caches = llm.stats().cache_resident_bytes
            if caches > held["caches"]:
                tokens = sum(one.prompt_tokens + one.generated_tokens for one in llm.slots())
                held.update(caches=caches, tokens=tokens, busy=resident())

        llm.on_step(look)
        prompts = [[5 + user] * length for user in range(options.busy)]
        results = llm.generate(prompts, params)
        if any(result.finish_reason != "length" for result in results):
            raise SystemExit("an answer ended too early")
        ended, after = resident(), llm.stats()
    dtype = backend_choice.cache_dtype_of(engine)
    return {
        "weights": memory.weight_bytes(MODEL, engine),
        "reserved": after.cache_reserved_bytes,
        "imported": imported,
        "starting": starting,
        "ready": ready,
        **held,
        "token_bytes": held["tokens"] * memory.cache_bytes_per_user(MODEL, 1, dtype),
        "ended": ended,
        "ended_caches": after.cache_resident_bytes,
    }


def resident() -> int:
    return 1024 * status()["VmRSS"]


def status() -> Mapping[str, int]:
    return fields(Path("/proc/self/status").read_text(encoding="ascii"))


if __name__ == "__main__":
    main()
