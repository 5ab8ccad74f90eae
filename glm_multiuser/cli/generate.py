"""`glm-multiuser generate`: a file of prompts to a file of answers."""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TextIO, Union

import typer

from glm_multiuser.cli import loading, screen
from glm_multiuser.errors import ConfigError, GLMMultiUserError, QueueFullError, UserBusyError

if TYPE_CHECKING:
    from glm_multiuser.handle import Handle
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling import SamplingParams

    Started = Union[Handle, GLMMultiUserError]
    """A request under way, or why it could not begin."""

STDIN = Path("-")
WAITING_PER_USER = 4
"""Prompts handed to the engine ahead of the one whose answer is written next, per slot."""


@dataclass(frozen=True)
class Job:
    """One line of the input; `error` says why it cannot even be tried."""

    index: int
    prompt: Union[str, list[int]]
    history: Sequence[Any] = ()
    user: Union[int, str, None] = None
    error: Optional[str] = None


def command(
    file: Annotated[
        Path, typer.Argument(help="One prompt per line, as text or as JSON; - reads stdin.")
    ] = STDIN,
    out: Annotated[Optional[Path], typer.Option(help="Write here.", show_default="stdout")] = None,
    checkpoint: loading.Checkpoint = loading.DEFAULT_CHECKPOINT,
    users: loading.Users = 8,
    max_tokens: loading.MaxTokens = 128,
    seq_length: loading.SeqLength = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many best tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this share of probability.")] = 1.0,
    seed: Annotated[Optional[int], typer.Option(help="Repeats sampled answers.")] = None,
    device_target: loading.DeviceTarget = "CPU",
    device_id: loading.DeviceId = 0,
    kernels: loading.Kernels = "auto",
    weight_dtype: loading.WeightDtype = None,
) -> None:
    """Answer every prompt of a file, many at a time; one JSON line per prompt, in their order.

    A line that begins with { is a JSON object with "prompt" (text or token ids) and, if wanted,
    "history" (pairs of question and answer) and "user"; any other line is a prompt as it stands.
    Empty lines are left out. A prompt that fails gives a line with "error" and does not end the
    others; the exit code is then 1.
    """
    params = loading.sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    jobs = list(read_jobs(read_lines(file)))
    failed = 0
    with ExitStack() as stack:
        llm = stack.enter_context(
            loading.open_llm(
                checkpoint,
                users,
                seq_length,
                device_target,
                device_id,
                kernels=kernels,
                weight_dtype=weight_dtype,
            )
        )
        target = stack.enter_context(open_target(out)) if out is not None else sys.stdout
        bar = stack.enter_context(screen.progress_bar())
        for row in bar.track(
            answer_all(llm, jobs, params, users), total=len(jobs), description="prompts"
        ):
            failed += "error" in row
            write_row(target, row)
    if failed:
        screen.notice(f"{failed} of {len(jobs)} prompts failed")
        raise typer.Exit(1)


def read_lines(file: Path) -> list[str]:
    """The lines of a file or of stdin.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file == STDIN:
        return sys.stdin.read().splitlines()
    try:
        # Only line feeds end a line: a prompt may hold any other separator of Unicode.
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def open_target(out: Path) -> TextIO:
    """The file for the answers.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        return out.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None


def write_row(target: TextIO, row: dict[str, Any]) -> None:
    """One line, there at once: whoever reads along need not wait for the end."""
    target.write(json.dumps(row, ensure_ascii=False) + "\n")
    target.flush()


def read_jobs(lines: Iterable[str]) -> Iterator[Job]:
    """One job per line that is not empty."""
    filled = (line.strip() for line in lines if line.strip())
    for index, line in enumerate(filled):
        yield read_object(index, line) if line.startswith("{") else Job(index, line)


def read_object(index: int, line: str) -> Job:
    """A line of JSON; what is wrong with it becomes the job's error.

    The history and the user are checked where they are used, as everybody's are.
    """
    try:
        values = json.loads(line)
    except ValueError as error:
        return Job(index, line, error=f"this line begins with {{ and is not JSON: {error}")
    prompt = values.get("prompt")
    if not isinstance(prompt, (str, list)):
        return Job(index, line, error=f"prompt is {prompt!r}; it must be a text or token ids")
    return Job(index, prompt, values.get("history", ()), values.get("user"))


def answer_all(
    llm: "MultiUserLLM", jobs: Iterable[Job], params: "SamplingParams", users: int
) -> Iterator[dict[str, Any]]:
    """The rows in the order of the jobs, with enough jobs under way to fill every slot."""
    under_way: deque[tuple[Job, Started]] = deque()
    for job in jobs:
        while True:
            try:
                under_way.append((job, start(llm, job, params)))
                break
            except (QueueFullError, UserBusyError) as error:
                # The oldest one makes room; with none under way there is nobody to wait for.
                if not under_way:
                    under_way.append((job, error))
                    break
                yield finish(*under_way.popleft())
        if len(under_way) > WAITING_PER_USER * users:
            yield finish(*under_way.popleft())
    while under_way:
        yield finish(*under_way.popleft())


def start(llm: "MultiUserLLM", job: Job, params: "SamplingParams") -> "Started":
    """A handle, or the error that this job ended with before it began."""
    if job.error is not None:
        return GLMMultiUserError(job.error)
    try:
        return llm.submit(job.prompt, params, user=job.user, history=job.history)
    except (QueueFullError, UserBusyError):
        raise
    except GLMMultiUserError as error:
        return error


def finish(job: Job, started: "Started") -> dict[str, Any]:
    """Waits for one job and makes its row."""
    row: dict[str, Any] = {"index": job.index, "prompt": job.prompt}
    if isinstance(started, GLMMultiUserError):
        return {**row, "error": f"{type(started).__name__}: {started}"}
    result = started.result()
    if result.error is not None:
        return {**row, "error": f"{type(result.error).__name__}: {result.error}"}
    return {
        **row,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
    }
