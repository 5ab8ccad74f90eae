"""Compares our engine with its peers on one machine, in one run.

    python benchmarks/peers/compare.py
    python benchmarks/peers/compare.py --model FILE.gguf

All use the same shape with random weights, or the same GGUF file; every user has its own prompt of
`context` tokens and generates `--new-tokens` tokens, greedily. The metric is decode tok/s: tokens
of all users while all of them decode. For each context and number of users, the variants are
measured in turn, `--repeat` times; numbers are medians, ratios are per round. Each variant is a
separate process that stays ready in between; only one computes at a time. Variants that cannot run
are skipped, with the reason. README.md in this folder says what cannot be compared. The last line
of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

from asking import Pool
from plot import plot_runs
from prepare import ENVIRONMENTS, HERE, LLAMA_CPP_PYTHON, batched_bench, compiler, gguf, python_of
from report import (
    Run,
    key,
    left_out,
    pair_table,
    prompt_pair_table,
    prompt_table,
    rate_table,
    summary,
)
from roofline import (
    WEIGHT_BYTES,
    Roofline,
    measure_reading,
    measure_roofline,
    weight_bytes,
    weight_count,
)
from variants import VARIANTS, Variant, variants_of

from glm_multiuser.backends.native.library import LEVEL
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import parse_users, random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.bench_run import users_text
from glm_multiuser.cli.conditions import cpu_name, machine
from glm_multiuser.cli.loading import model_config
from glm_multiuser.errors import ConfigError, GLMMultiUserError
from glm_multiuser.version import installed_version

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "sve")
LLAMA_OPTIONS = "--flash-attn off --load-mode none"
PROCESS_MB = 1500.0
"""Estimate of a worker's memory beside weights and caches, before its first measurement."""


def main() -> int:
    """Returns the exit code."""
    options = parse_arguments()
    numbers, contexts = parse_users(options.users), parse_users(options.context)
    names = parse_variants(options.variants, options.model)
    if options.avx2:
        os.environ[LEVEL] = "avx2"
    if options.model is None:
        shape = random_shape(
            options.hidden, options.layers, options.inner, options.heads, options.vocab
        )
    else:
        shape = shape_of(options.model)
    commands, absent = prepare_all(names, shape, options)
    # Of a file's matrices, each with a type of its own, there is none.
    roofline = find_roofline() if options.model is None else None
    conditions = {**conditions_of(options, shape), "roofline": roofline or "not measured"}
    print_conditions(screen.wide_output(120), conditions)
    runs: list[Run] = []
    for context in contexts:
        for users in numbers:
            cells = [new_run(name, context, users, absent.get(name)) for name in names]
            skip_slow(cells, options.slow_users)
            measure_cell(cells, commands, shape, options, reading=roofline is not None)
            runs += cells
    runs = summary(runs, roofline, shape, options.new_tokens)
    for context in contexts:
        for make in (rate_table, pair_table, prompt_table, prompt_pair_table):
            table = make(runs, context, numbers)
            if table is not None:
                print(table, end="\n\n")
    for line in left_out(runs):
        print(line)
    if any(run["decode_tok_s"] for run in runs):
        plot_runs(runs, roofline, conditions, shape, options.plot)
        screen.notice(f"plot written to {options.plot}")
    line = json.dumps({"conditions": conditions, "roofline": roofline, "runs": runs})
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if any(run["decode_tok_s"] for run in runs) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE.gguf",
        help="compute with this instead of random weights",
    )
    parser.add_argument("--users", default="1,8,16,32")
    parser.add_argument("--context", default="128,900", help="tokens of every prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; numbers are medians")
    parser.add_argument("--variants", help="default: all that can run the model")
    parser.add_argument(
        "--slow-users",
        type=int,
        default=8,
        help="most users for variants that take minutes with more",
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument(
        "--llama-options", default=LLAMA_OPTIONS, help="more options of llama-batched-bench"
    )
    parser.add_argument(
        "--avx2",
        action="store_true",
        help="our kernels and llama.cpp as on a processor that has nothing better",
    )
    parser.add_argument("--plot", type=Path, default=Path("peers.png"))
    parser.add_argument("--json", type=Path, help="write the last line also here")
    return parser.parse_args()


def parse_variants(text: Optional[str], model: Optional[Path]) -> list[str]:
    """Parses a list such as "portable,llama-f32"; without text, all variants that run the model.

    Raises:
        ConfigError: an unknown variant.
    """
    known = variants_of("random" if model is None else "file")
    names = known if text is None else text.split(",")
    if not set(names) <= set(known):
        raise ConfigError(f"variants is {text!r}; here it must be some of {','.join(known)}")
    return names


def shape_of(model: Path) -> dict[str, int]:
    """The shape of a file's model, for prompts and estimates.

    Raises:
        ConfigError: it is not a file.
        CheckpointError: its model cannot be read.
    """
    if not model.is_file():
        raise ConfigError(f"model is {str(model)!r}; it must be a GGUF file")
    config = model_config(model)
    names = ("vocab_size", "hidden_size", "num_layers", "inner_hidden_size", "num_attention_heads")
    return {name: getattr(config, name) for name in names}


Command = tuple[list[str], "dict[str, Any]"]
"""The command of a worker, and the settings of its variant."""


def prepare_all(
    names: list[str], shape: dict[str, int], options: argparse.Namespace
) -> tuple[dict[str, Command], dict[str, str]]:
    """Returns each variant's command, and the reasons why others cannot run."""
    commands, absent = {}, {}
    for name in names:
        variant = VARIANTS[name]
        try:
            commands[name] = prepare_one(variant, shape, options)
        except GLMMultiUserError as error:
            screen.notice(f"{variant.label}: {error}")
            absent[name] = str(error)
    return commands, absent


def prepare_one(variant: Variant, shape: dict[str, int], options: argparse.Namespace) -> Command:
    settings = dict(variant.settings)
    of_llama = variant.worker == "llama_cpp_worker.py"
    if options.avx2 and not of_llama and settings.get("kernels") != "native":
        raise GLMMultiUserError("it is not limited to AVX2")
    if options.model is not None:
        settings["model"] = str(options.model.resolve())
    if of_llama:
        settings["program"] = str(batched_bench(options.avx2))
        settings["options"] = options.llama_options
        if options.model is None:
            settings["model"] = str(gguf(shape, settings["kind"]))
    own = variant.environment == "own"
    python = sys.executable if own else str(python_of(variant.environment))
    return [python, str(HERE / variant.worker)], settings


def find_roofline() -> Optional[Roofline]:
    found = compiler()
    if found is None:
        screen.notice("no roofline: there is no C++ compiler to build its measurement with")
        return None
    screen.notice("measuring read bandwidth and peak flops ...")
    ENVIRONMENTS.mkdir(exist_ok=True)
    try:
        return measure_roofline(found, ENVIRONMENTS)
    except RuntimeError as error:
        screen.notice(f"no roofline: {error}")
        return None


def conditions_of(options: argparse.Namespace, shape: dict[str, int]) -> dict[str, Any]:
    """The machine, all versions, and the workload."""
    return {
        **machine(),
        "cpu": processor(),
        "cpu_flags": " ".join(cpu_flags()),
        "limited_to": "AVX2" if options.avx2 else "nothing",
        "kernel": platform.release(),
        "compiler": first_line([compiler() or "c++", "--version"]),
        "mindformers": installed_version("mindformers"),
        "torch": peer_version("torch", "torch"),
        "transformers": peer_version("torch", "transformers"),
        "openvino_genai": peer_version("openvino", "openvino-genai"),
        "llama_cpp": f"of llama-cpp-python {LLAMA_CPP_PYTHON}",
        "llama_cpp_options": options.llama_options,
        **shape,
        **weights_of(options.model, shape),
        "users": options.users,
        "context": f"prompts of {options.context} tokens",
        "new_tokens": options.new_tokens,
        "repeat": options.repeat,
    }


def weights_of(model: Optional[Path], shape: dict[str, int]) -> dict[str, Any]:
    if model is not None:
        return {"weights": model.name, "weights_mb": round(model.stat().st_size / 1e6)}
    read = {kind: round(weight_bytes(shape, kind) / 1e6) for kind in WEIGHT_BYTES}
    return {"weights": "random", "weights_read_per_step_mb": read}


def processor() -> str:
    """The CPU's name, and the numbers that identify its generation where the name is hidden."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return cpu_name()
    words = {
        name.strip(): value.strip() for name, _, value in (one.partition(":") for one in lines)
    }
    numbers = [f"{key} {words[key]}" for key in ("cpu family", "model") if key in words]
    return f"{cpu_name()} ({', '.join(numbers)})" if numbers else cpu_name()


def cpu_flags() -> list[str]:
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [flag for flag in FLAGS if flag in words]


def first_line(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "not installed"
    return (ended.stdout.splitlines() or ["unknown"])[0]


def peer_version(environment: str, distribution: str) -> str:
    python = ENVIRONMENTS / f"{environment}-python" / "bin" / "python"
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return first_line([str(python), "-c", code])


def new_run(name: str, context: int, users: int, reason: Optional[str]) -> Run:
    return {
        "variant": name,
        "context": context,
        "users": users,
        "reason": reason,
        "rounds": [],
        "prefill_s": [],
        "read_gb_s": [],
        "ahead": None,
        "start_s": None,
        "peak_mb": None,
    }


def skip_slow(cells: list[Run], most: int) -> None:
    """Skips variants that would take minutes, with the reason."""
    for run in cells:
        if VARIANTS[run["variant"]].slow and run["users"] > most and not run["reason"]:
            run["reason"] = f"takes minutes with more than {most} (--slow-users)"


def measure_cell(
    cells: list[Run],
    commands: dict[str, Command],
    shape: dict[str, int],
    options: argparse.Namespace,
    reading: bool,
) -> None:
    """Runs all rounds of one context and number of users, the variants in turn; optionally measures
    the read bandwidth after each."""
    pool = Pool()
    try:
        for number in range(1, options.repeat + 1):
            for run in cells:
                if run["reason"] is None:
                    name, context, users = key(run)
                    screen.notice(
                        f"context {context}, {users_text(users)}, round {number} of "
                        f"{options.repeat}: {VARIANTS[name].label} ..."
                    )
                    measure_once(pool, run, commands[name], shape, options.new_tokens)
                    if reading and run["reason"] is None:
                        run["read_gb_s"].append(measure_reading(ENVIRONMENTS))
    finally:
        pool.close()


def measure_once(
    pool: Pool, run: Run, command: Command, shape: dict[str, int], new_tokens: int
) -> None:
    """Adds a round to a run; a failed run is not retried."""
    name, context, users = key(run)
    words, settings = command
    job = {
        "shape": shape,
        "users": users,
        "context": context,
        "new_tokens": new_tokens,
        "threads": len(os.sched_getaffinity(0)),
        "settings": settings,
    }
    began = time.perf_counter()
    try:
        found = pool.measure(name, words, job, estimate_mb(run, shape, new_tokens))
    except GLMMultiUserError as error:
        run["reason"] = str(error)
        screen.notice(f"{VARIANTS[name].label}: left out: {error}")
        return
    run["rounds"].append(round(found["decode_tok_s"], 2))
    run["prefill_s"].append(round(found["prefill_s"], 6))
    for figure in ("start_s", "peak_mb", "ahead"):
        run[figure] = found.get(figure)
    seconds = time.perf_counter() - began
    screen.notice(f"  {found['decode_tok_s']:.1f} tok/s ({seconds:.0f} s)")


def estimate_mb(run: Run, shape: dict[str, int], new_tokens: int) -> float:
    """Upper bound of a worker's memory: twice its weights, as during loading, and twice its caches,
    as while they grow."""
    variant = VARIANTS[run["variant"]]
    # Caches come in blocks of 256 positions, or less often.
    positions = -(-(run["context"] + new_tokens) // 256) * 256
    cached = 2 * shape["num_layers"] * shape["hidden_size"] * positions * run["users"]
    weights = 4 * weight_count(shape)
    return PROCESS_MB + 2 * (weights + variant.cache_bytes * cached) / 2**20


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GLMMultiUserError as error:
        screen.print_error(error)
        sys.exit(2)
