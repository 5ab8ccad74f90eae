"""`glm-multiuser bench`: throughput and latency for several numbers of users."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from glm_multiuser.cli import loading, screen
from glm_multiuser.cli.bench_plot import plot_runs
from glm_multiuser.cli.bench_report import print_conditions, table_of
from glm_multiuser.cli.bench_run import RunSettings, check_engine, users_text
from glm_multiuser.cli.conditions import machine, workload
from glm_multiuser.cli.options import takes_options
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError, GLMMultiUserError


@takes_options(EngineConfig, seq_length=256)
def command(
    checkpoint: Annotated[
        Optional[Path],
        typer.Option(
            help="Folder, GGUF file or Hugging Face model (owner/name) to measure instead of "
            "random weights."
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Random weights: hidden size.")] = 1024,
    layers: Annotated[int, typer.Option(help="Random weights: layers.")] = 12,
    inner: Annotated[int, typer.Option(help="Random weights: inner size of the MLP.")] = 4096,
    heads: Annotated[int, typer.Option(help="Random weights: attention heads.")] = 16,
    vocab: Annotated[int, typer.Option(min=32, help="Random weights: vocabulary.")] = 16384,
    users: Annotated[str, typer.Option(help="Numbers of users, one run each.")] = "1,2,4,8,16,32",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds per run.")] = 1,
    plot: Annotated[Path, typer.Option(help="Write the plot here.")] = Path("bench.png"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Skip the plot.")] = False,
    json_file: Annotated[
        Optional[Path], typer.Option("--json", help="Also write the JSON here.")
    ] = None,
    **settings: Any,
) -> None:
    """Measure throughput and latency for several numbers of users.

    Each run has its own process, to measure start-up time and peak memory.
    N threads, one per user, submit random prompts of a fixed length concurrently through the public
    API; decoding is greedy, end-of-sequence ids are ignored, the first round is a warm-up. The
    metrics are defined in glm_multiuser/cli/measure.py. The last line of stdout is one JSON object.
    """
    numbers = parse_users(users)
    if not no_plot:
        screen.check_picture(plot)
    screen.check_writable(json_file)
    seq_length = settings.pop("seq_length")
    all_settings = [
        RunSettings(
            users=number,
            seq_length=seq_length,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeat=repeat,
            checkpoint=str(checkpoint) if checkpoint else None,
            shape={} if checkpoint else random_shape(hidden, layers, inner, heads, vocab),
            options=settings,
        )
        for number in numbers
    ]
    engines = [one.engine() for one in all_settings]  # rejects before anything is downloaded
    if checkpoint is not None:
        folder = str(loading.find_checkpoint(checkpoint, engines[0].check_fits))
        all_settings = [replace(one, checkpoint=folder) for one in all_settings]
    for one in all_settings:
        check_engine(one)
    conditions = {**machine(), **workload(all_settings[0])}
    console = screen.wide_output(160)
    print_conditions(console, conditions)
    runs, failed = run_all(all_settings)
    screen.print_numbers(console, table_of(runs))
    if runs and not no_plot:
        plot_runs(runs, conditions, plot)
        screen.notice(f"plot written to {plot}")
    line = json.dumps({"conditions": conditions, "runs": runs})
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    typer.echo(line)
    if failed:
        raise typer.Exit(1)


def parse_users(text: str) -> list[int]:
    """Parses "1,2,4".

    Raises:
        ConfigError: not integers of at least 1.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"users is {text!r}; it must be numbers of at least 1, as in 1,2,4")
    return numbers


def random_shape(hidden: int, layers: int, inner: int, heads: int, vocab: int) -> dict[str, int]:
    """Returns the fields of a `ModelConfig`, with special ids at the end of the vocabulary."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": heads,
        "inner_hidden_size": inner,
        "mask_token_id": vocab - 5,
        "gmask_token_id": vocab - 4,
        "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
    }


def run_all(all_settings: Sequence[RunSettings]) -> tuple[list[dict[str, Any]], bool]:
    """Runs all in turn; failed runs are reported and skipped."""
    runs = []
    failed = False
    for settings in all_settings:
        started = time.perf_counter()
        screen.notice(f"{users_text(settings.users)}: starting an engine and measuring ...")
        try:
            runs.append(run_in_child(settings))
        except GLMMultiUserError as error:
            screen.print_error(error)
            failed = True
            continue
        seconds = time.perf_counter() - started
        screen.notice(
            f"{users_text(settings.users)}: {runs[-1]['tok_s']:.1f} tok/s ({seconds:.0f} s)"
        )
    return runs, failed


def run_in_child(settings: RunSettings) -> dict[str, Any]:
    """Performs one run in a fresh process.

    Raises:
        GLMMultiUserError: the run failed or its process died.
    """
    try:
        return run_worker(["-m", "glm_multiuser.cli.bench_worker"], asdict(settings))
    except GLMMultiUserError as error:
        raise GLMMultiUserError(f"{users_text(settings.users)}: {error}") from None


def run_worker(worker: Sequence[str], job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a measurement in a fresh process, which inherits stderr for its progress bars.

    Args:
        worker: arguments of Python. It reads `job` from stdin as JSON; its last line of output is
            the run, or {"error": ...}.
        job: the measurement.

    Raises:
        GLMMultiUserError: the run failed or its process died.
    """
    child = subprocess.run(
        [sys.executable, *worker],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = child.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        result = {}
    if child.returncode or "tok_s" not in result:
        raise GLMMultiUserError(
            result.get("error", f"its process ended with code {child.returncode}")
        )
    return dict(result)
