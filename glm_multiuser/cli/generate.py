"""`glm-multiuser generate`: a file of prompts to a file of answers."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, Union

import typer

from glm_multiuser.cli import loading, screen
from glm_multiuser.cli.generate_input import STDIN, Job, is_input, read_jobs, read_lines
from glm_multiuser.cli.generate_output import Rows
from glm_multiuser.cli.interrupts import saying
from glm_multiuser.cli.options import Checkpoint, JsonSchema, Sampling, takes_options
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError, GLMMultiUserError, TooManyRequestsError
from glm_multiuser.settings import pick

if TYPE_CHECKING:
    from glm_multiuser.answer import GenerationResult
    from glm_multiuser.handle import Handle
    from glm_multiuser.llm import MultiUserLLM

    Started = Union[Handle, Future[GenerationResult], GLMMultiUserError]
    """A running request, or why it was rejected."""

WAITING_PER_USER = 4
"""Prompts per slot that are submitted ahead of the one whose answer is written next."""


@takes_options(EngineConfig)
@takes_options(Sampling)
def command(
    file: Annotated[
        Path, typer.Argument(help="File with one prompt per line, text or JSON; -: stdin.")
    ] = STDIN,
    out: Annotated[Optional[Path], typer.Option(help="Output file.", show_default="stdout")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the rows already in --out.")
    ] = False,
    json_schema: JsonSchema = None,
    checkpoint: Checkpoint = loading.DEFAULT_CHECKPOINT,
    **settings: Any,
) -> None:
    """Generate an answer for every prompt in a file; one JSON line per prompt, in order.

    A line that begins with { is a JSON object with "prompt" (text or token ids) and optionally
    "history" (pairs of question and answer), "user", "json_schema", and fields of SamplingParams
    ("max_tokens", "temperature", "seed", "stop", ...) that override the options; any other line is
    a plain text prompt. Empty lines are skipped. A prompt that fails gives a line with "error"; the
    others continue, and the exit code is 1.
    """
    grammar = loading.json_grammar(json_schema)
    params = loading.sampling_params(**pick(Sampling, settings), grammar=grammar)
    jobs = list(read_jobs(read_lines(file), params))
    if not jobs:
        raise ConfigError(f"{'stdin' if file == STDIN else file} has no prompts")
    if out is not None and out.is_file() and is_input(out, file):
        raise ConfigError(f"out is {out}, which is the file of prompts; it must be another one")
    with ExitStack() as stack:
        rows = stack.enter_context(Rows(out))
        if resume:
            rows.resume([job.prompt for job in jobs])
        stack.enter_context(saying(lambda: f"interrupted: {rows.report(len(jobs))}"))
        llm = stack.enter_context(loading.open_llm(checkpoint, **settings))
        loading.check_grammar(llm, grammar)
        # On a terminal the rows show the progress, and a bar would be drawn over them.
        elsewhere = out is not None or not sys.stdout.isatty()
        bar = stack.enter_context(screen.progress_bar(shown=elsewhere))
        left = jobs[rows.count :]
        answers = answer_all(llm, left, settings["users"])
        for row in bar.track(answers, total=len(left), description="prompts"):
            rows.write(row)
    if rows.failed:
        screen.notice(f"{rows.failed} of {len(jobs)} prompts failed")
        raise typer.Exit(1)


def answer_all(llm: "MultiUserLLM", jobs: Iterable[Job], users: int) -> Iterator[dict[str, Any]]:
    """Yields rows in the order of the jobs, with enough running jobs to fill every slot."""
    under_way: deque[tuple[Job, Started]] = deque()
    readers = ThreadPoolExecutor(WAITING_PER_USER * users + 1, "reader")
    try:
        for job in jobs:
            while True:
                try:
                    under_way.append((job, start(llm, job, readers)))
                    break
                except TooManyRequestsError as error:
                    if not under_way:
                        under_way.append((job, error))
                        break
                    yield finish(*under_way.popleft())
            if len(under_way) > WAITING_PER_USER * users:
                yield finish(*under_way.popleft())
        while under_way:
            yield finish(*under_way.popleft())
    finally:
        readers.shutdown(wait=False, cancel_futures=True)


def start(llm: "MultiUserLLM", job: Job, readers: ThreadPoolExecutor) -> "Started":
    """Submits a job; returns what its result comes from, or the error that rejected it."""
    if job.error is not None:
        return job.error
    try:
        handle = llm.submit(job.prompt, user=job.user, history=job.history, params=job.params)
    except TooManyRequestsError:
        raise
    except GLMMultiUserError as error:
        return error
    # Only its reader finds a stop string, and ends the request there.
    return readers.submit(handle.result) if job.params.stop else handle


def finish(job: Job, started: "Started") -> dict[str, Any]:
    """Waits for one job and returns its row."""
    row: dict[str, Any] = {"index": job.index, "prompt": job.prompt}
    if isinstance(started, GLMMultiUserError):
        return {**row, "error": f"{type(started).__name__}: line {job.line}: {started}"}
    result = started.result()
    if result.error is not None:
        return {**row, "error": f"{type(result.error).__name__}: {result.error}"}
    row.update(
        text=result.text,
        token_ids=list(result.token_ids),
        finish_reason=result.finish_reason,
        usage=asdict(result.usage),
    )
    if result.logprobs is not None:
        row["logprobs"] = [asdict(one) for one in result.logprobs]
    if result.prompt_logprobs is not None:
        row["prompt_logprobs"] = [one and asdict(one) for one in result.prompt_logprobs]
    return row
