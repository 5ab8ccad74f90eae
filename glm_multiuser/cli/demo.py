"""`glm-multiuser demo`: concurrent users, each in a pane, and a check of their isolation."""

import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_multiuser.cli import loading, screen
from glm_multiuser.cli.chat_answers import ChatAnswer, chat_alone, same, start_chats, wall_seconds
from glm_multiuser.cli.generate_input import read_lines
from glm_multiuser.cli.options import Checkpoint, Sampling, takes_options
from glm_multiuser.cli.panes import show, status
from glm_multiuser.cli.questions import questions
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.settings import pick

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling_params import SamplingParams


@takes_options(EngineConfig, seq_length=256)
@takes_options(Sampling, without=("temperature", "top_k", "top_p", "seed"))
def command(
    checkpoint: Checkpoint = loading.DEFAULT_CHECKPOINT,
    prompts: Annotated[
        Optional[Path],
        typer.Option(
            help="File with one prompt per line, reused if there are more users.",
            show_default="questions that glm-tiny knows",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Run concurrent users, then each request alone; the answers must be identical.

    The exit code is 1 if any answer differs.
    """
    users = EngineConfig(**pick(EngineConfig, settings)).users  # checked before it is used
    asked = questions(users) if prompts is None else prompts_of(prompts, users)
    params = loading.sampling_params(**pick(Sampling, settings), temperature=0.0)
    with loading.open_llm(checkpoint, chat=True, **settings) as llm:
        answers = [
            ChatAnswer(f"user {number}", question) for number, question in enumerate(asked, start=1)
        ]
        console = screen.output()
        threads = start_chats(llm, answers, params)
        if console.is_terminal:
            show(console, answers, threads)
        else:
            print_transcript(console, answers, threads)
        alone = ask_each_alone(llm, answers, params)
        identical = print_proof(console, answers, alone)
        print_speed(console, llm, answers, alone)
    if not identical:
        raise typer.Exit(1)


def prompts_of(file: Path, count: int) -> list[str]:
    """Reads `count` prompts from a file.

    Raises:
        ConfigError: the file is unreadable, not UTF-8, or empty.
    """
    prompts = [line.strip() for line in read_lines(file) if line.strip()]
    if not prompts:
        raise ConfigError(f"prompts is {file}, which has none")
    return [prompts[index % len(prompts)] for index in range(count)]


def ask_each_alone(
    llm: "MultiUserLLM", answers: Sequence[ChatAnswer], params: "SamplingParams"
) -> list[ChatAnswer]:
    """Repeats every request, one at a time."""
    screen.notice("running every request again, one at a time ...")
    with screen.progress_bar() as bar:
        return [
            chat_alone(llm, answer, params) for answer in bar.track(answers, description="alone")
        ]


def print_proof(
    console: Console, answers: Sequence[ChatAnswer], alone: Sequence[ChatAnswer]
) -> bool:
    """Compares token by token; returns True if all answers are identical."""
    pairs = list(zip(answers, alone))
    good = sum(same(*pair) for pair in pairs)
    console.print(
        Text(
            f"{good} of {len(pairs)} answers are identical to the same user alone",
            style="bold green" if good == len(pairs) else "bold red",
        )
    )
    for together, single in pairs:
        if not same(together, single):
            console.print(Text(f"  {together.user} differs: {difference(together, single)}", "red"))
    return good == len(pairs)


def difference(together: ChatAnswer, alone: ChatAnswer) -> str:
    """Describes how two answers differ."""
    for name, answer in (("together", together), ("alone", alone)):
        if answer.error is not None:
            return f"failed {name}: {answer.error}"
    both = zip(together.token_ids, alone.token_ids)
    place = next(
        (index for index, (one, other) in enumerate(both) if one != other),
        min(len(together.token_ids), len(alone.token_ids)),
    )
    return (
        f"from token {place} on ({len(together.token_ids)} tokens together, "
        f"{len(alone.token_ids)} alone)"
    )


def print_speed(
    console: Console,
    llm: "MultiUserLLM",
    answers: Sequence[ChatAnswer],
    alone: Sequence[ChatAnswer],
) -> None:
    """Prints tokens per second, TTFT, start-up time, and compiles after ready."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = max(wall_seconds(answers), 1e-9)
    seconds_alone = sum(wall_seconds([answer]) for answer in alone)
    first = [
        answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None
    ]
    per_user = [answer.tokens_per_second for answer in answers]
    stats = llm.stats()
    table = Table.grid(padding=(0, 2))
    table.add_row("together", f"{tokens} tokens in {seconds:.2f} s = {tokens / seconds:.0f} tok/s")
    table.add_row(
        "per user",
        f"{median(per_user):.0f} tok/s (slowest {min(per_user):.0f}, fastest {max(per_user):.0f})",
    )
    table.add_row(
        "one by one",
        f"{seconds_alone:.2f} s for the same answers: "
        f"together is {seconds_alone / seconds:.1f} times as fast",
    )
    if first:
        table.add_row(
            "first token",
            f"p50 {1000 * median(first):.0f} ms, slowest {1000 * max(first):.0f} ms",
        )
    table.add_row(
        "start-up",
        f"{stats.start_seconds:.1f} s, {stats.compile_seconds:.1f} s of it compiling "
        f"{stats.compiles} graphs; {stats.compiles_after_ready} compiled after ready",
    )
    console.print(table)


def print_transcript(
    console: Console, answers: Sequence[ChatAnswer], threads: Sequence[threading.Thread]
) -> None:
    """Prints one block per user, in order, for a file or a pipe."""
    for answer, thread in zip(answers, threads):
        thread.join()
        console.print(Text(f"[{answer.user}] {answer.question}", "bold"), soft_wrap=True)
        console.print(Text(screen.printable(answer.error or answer.text)), soft_wrap=True)
        console.print(Text(f"({status(answer)})", "dim"), soft_wrap=True)
        console.print()
