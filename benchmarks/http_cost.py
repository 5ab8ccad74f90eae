"""Measures HTTP overhead: the same requests through the server and through the library.

    python benchmarks/http_cost.py --users 16

One engine in this process and one in `glm-multiuser serve`, with the same random weights. All users
send concurrent requests to one, then to the other, `--repeat` times; the result is the ratio of
each pair. Prompts are token ids; decoding is greedy, end of sequence ignored. Over HTTP, answers
are streamed from OpenAI's `/v1/completions`. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

import httpx
from random_checkpoint import write_random_chat_model
from rich.table import Table
from server_process import serve_command, server

from glm_multiuser.cli import loading, measure, screen
from glm_multiuser.cli.bench import random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.bench_run import RunSettings, open_engine, prompts_of
from glm_multiuser.cli.conditions import machine, workload
from glm_multiuser.errors import GLMMultiUserError

PATIENCE = 600.0


def main() -> int:
    """Returns the exit code."""
    options = parse_arguments()
    shape = random_shape(
        options.hidden, options.layers, options.inner, options.heads, options.vocab
    )
    with tempfile.TemporaryDirectory(prefix="glm_multiuser-") as name:
        folder = Path(name)
        screen.notice("writing random weights ...")
        write_random_chat_model(folder, shape)
        settings = RunSettings(
            users=options.users,
            seq_length=options.seq_length,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            repeat=options.repeat,
            checkpoint=name,
        )
        conditions = {**machine(), **workload(settings)}
        console = screen.wide_output(100)
        print_conditions(console, conditions)
        pairs = compare(folder, settings)
    ratios = [pair["http"] / pair["library"] for pair in pairs]
    table = Table("pair", "library tok/s", "HTTP tok/s", "HTTP / library")
    for number, (pair, ratio) in enumerate(zip(pairs, ratios), start=1):
        table.add_row(str(number), f"{pair['library']:.1f}", f"{pair['http']:.1f}", f"{ratio:.3f}")
    console.print(table)
    result = {"conditions": conditions, "pairs": pairs, "median_ratio": round(median(ratios), 4)}
    print(json.dumps(result))
    return 0


def parse_arguments(description: Optional[str] = __doc__, repeat: int = 3) -> argparse.Namespace:
    """Options for the shape and the load of this benchmark and similar ones."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=repeat)
    return parser.parse_args()


def compare(folder: Path, settings: RunSettings) -> list[dict[str, float]]:
    """tok/s of both, alternating."""
    prompts = prompts_of(settings)
    command = serve_command(folder, settings.users, settings.seq_length)
    with server("HTTP", command, "/v2/health/ready") as url:
        screen.notice("library: starting ...")
        with open_engine(settings) as llm:
            params = loading.sampling_params(
                max_tokens=settings.new_tokens, temperature=0.0, ignore_eos=True
            )
            pairs = []
            for number in range(settings.repeat + 1):
                screen.notice("warm-up" if not number else f"pair {number} of {settings.repeat}")
                library = measure.total_rate(measure.run_round(llm, prompts, params))
                http = asyncio.run(http_rate(url, folder.name, prompts, settings.new_tokens))
                pairs.append({"library": round(library, 2), "http": round(http, 2)})
    return pairs[1:]


async def http_rate(
    url: str, model: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> float:
    """tok/s of concurrent prompts: tokens over the time from first request to last byte.

    Raises:
        GLMMultiUserError: an answer has the wrong length.
    """
    timeout, limits = httpx.Timeout(PATIENCE), httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:

        async def ask(prompt: Sequence[int]) -> int:
            body: dict[str, Any] = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            events = []
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(line)
            usage = json.loads(events[-1][len("data: ") :])["usage"]
            return int(usage["completion_tokens"])

        started = time.perf_counter()
        counts = await asyncio.gather(*map(ask, prompts))
        seconds = time.perf_counter() - started
    if set(counts) != {new_tokens}:
        raise GLMMultiUserError(f"answers have {sorted(set(counts))} tokens, not {new_tokens}")
    return sum(counts) / seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GLMMultiUserError as error:
        screen.print_error(error)
        sys.exit(2)
