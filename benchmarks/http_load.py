"""Load test with evalscope: the server against a plain single-lock server.

    python benchmarks/http_load.py --clients 1,4,8,16

`evalscope perf`, in its own virtual environment (created if missing), streams chats with 1, 4, 8
and 16 concurrent clients: from `glm-multiuser serve`, and from plain_server.py, which puts one lock
around `chat`. Both serve the same random weights; one server runs at a time. Answers have a fixed
length, decoding is greedy, end of sequence ignored; the first round is discarded.

TTFT, ITL and tok/s are evalscope's: from sending a request to its first text, between two events
with text, and all tokens over the time from the first request to the last answer. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from random_checkpoint import write_random_chat_model
from rich.table import Table
from server_process import serve_command, server

from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import parse_users, random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.conditions import machine
from glm_multiuser.errors import GLMMultiUserError

EVALSCOPE = "1.14.1"
MODEL = "random"
PLAIN = Path(__file__).with_name("plain_server.py")
VARIANTS = {"plain": "one lock around chat", "server": "glm-multiuser serve"}
CHARACTERS = "你我他是谁什么怎样今天明年一二三四五六七八九十大小多少来去东西南北上下学生工作朋友"
PROMPT_CHARACTERS = 10


def main() -> int:
    """The exit code."""
    options = parse_arguments()
    clients = parse_users(options.clients)
    evalscope = install(options.environment)
    shape = random_shape(options.hidden, options.layers, options.inner, options.heads, 2048)
    conditions = {
        **machine(),
        "evalscope": EVALSCOPE,
        **{name: shape[name] for name in ("hidden_size", "num_layers", "inner_hidden_size")},
        "new_tokens": options.new_tokens,
        "requests_per_client": options.requests,
        "slots": max(clients),
    }
    console = screen.wide_output(110)
    print_conditions(console, conditions)
    runs = []
    with tempfile.TemporaryDirectory(prefix="glm_multiuser-") as name:
        work = Path(name)
        folder = work / MODEL
        folder.mkdir()
        screen.notice("writing random weights ...")
        write_random_chat_model(folder, shape)
        write_prompts(work / "prompts.txt", max(clients) * (options.requests + 1))
        for variant in VARIANTS:
            with server(VARIANTS[variant], *start(variant, folder, max(clients))) as url:
                load(evalscope, url, work, 1, 1, 4)  # warm-up
                for number in clients:
                    screen.notice(f"{VARIANTS[variant]}: {number} clients ...")
                    count = number * options.requests
                    run = load(evalscope, url, work, number, count, options.new_tokens)
                    runs.append({"variant": variant, "clients": number, **run})
    screen.print_numbers(console, table_of(runs))
    print(json.dumps({"conditions": conditions, "runs": runs}))
    return 0 if all(run["failed"] == 0 for run in runs) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each client, one by one")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(".venv-evalscope"),
        help="virtual environment of the load client",
    )
    return parser.parse_args()


def install(environment: Path) -> Path:
    """The load client's command; it needs other versions of our dependencies."""
    command = environment / "bin" / "evalscope"
    if not command.exists():
        screen.notice(f"installing evalscope {EVALSCOPE} into {environment} (some minutes) ...")
        venv.create(environment, with_pip=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, f"evalscope[perf]=={EVALSCOPE}"], check=True)
    return command


def start(variant: str, folder: Path, users: int) -> tuple[list[str], str]:
    """The command of a server, and its readiness path."""
    if variant == "server":
        return serve_command(folder, users, 256, "--max-queue", "64"), "/v2/health/ready"
    return [str(PLAIN), "--checkpoint", str(folder)], "/ready"


def write_prompts(path: Path, count: int) -> None:
    """Distinct questions of one length, identical in every run."""
    source = random.Random(0)
    lines = ("".join(source.choices(CHARACTERS, k=PROMPT_CHARACTERS)) for _ in range(count))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(
    evalscope: Path, url: str, work: Path, clients: int, requests: int, new_tokens: int
) -> dict[str, Any]:
    """Results of one run of the load client.

    Raises:
        GLMMultiUserError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=work) as results:
        command = [
            str(evalscope.absolute()),
            "perf",
            *("--url", f"{url}/v1/chat/completions", "--api", "openai", "--model", MODEL),
            *("--dataset", "line_by_line", "--dataset-path", str(work / "prompts.txt")),
            *("--parallel", str(clients), "--number", str(requests)),
            *("--max-tokens", str(new_tokens), "--min-tokens", str(new_tokens)),
            *("--extra-args", '{"ignore_eos": true}', "--temperature", "0", "--stream"),
            *("--outputs-dir", results, "--no-timestamp", "--no-test-connection"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        found = list(Path(results).rglob("benchmark_summary.json"))
        if done.returncode or not found:
            raise GLMMultiUserError(f"evalscope failed: {(done.stdout + done.stderr)[-2000:]}")
        summary = json.loads(found[0].read_text(encoding="utf-8"))
        percentiles = json.loads(
            found[0].with_name("benchmark_percentile.json").read_text(encoding="utf-8")
        )
    rows = {row["Percentiles"]: row for row in percentiles}
    return {
        "tok_s": summary["Output Throughput (tok/s)"],
        "requests": summary["Total Requests"],
        "failed": summary["Failed Requests"],
        "ttft_ms": {"p50": rows["50%"]["TTFT (ms)"], "p99": rows["99%"]["TTFT (ms)"]},
        "itl_ms": {"p50": rows["50%"]["ITL (ms)"], "p99": rows["99%"]["ITL (ms)"]},
    }


def table_of(runs: Sequence[dict[str, Any]]) -> Table:
    """One line per run, grouped by number of clients."""
    table = Table(title="evalscope perf, streamed chats")
    for heading in ("clients", "server", "tok/s", "TTFT ms p50/p99", "ITL ms p50/p99", "failed"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for run in sorted(runs, key=lambda run: (run["clients"], list(VARIANTS).index(run["variant"]))):
        table.add_row(
            str(run["clients"]),
            VARIANTS[run["variant"]],
            f"{run['tok_s']:.1f}",
            "/".join(f"{run['ttft_ms'][name]:,.0f}" for name in ("p50", "p99")),
            "/".join(f"{run['itl_ms'][name]:,.0f}" for name in ("p50", "p99")),
            str(run["failed"]),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GLMMultiUserError as error:
        screen.print_error(error)
        sys.exit(2)
