"""`glm-multiuser selfcheck`: checks that this machine computes correctly. Run it first."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Callable, Optional

import typer
from rich.table import Table
from rich.text import Text

from glm_multiuser import package_data
from glm_multiuser.cli import loading, screen
from glm_multiuser.cli.chat_answers import ChatAnswer, chat_alone, chat_together, same
from glm_multiuser.cli.options import Checkpoint, takes_options
from glm_multiuser.cli.questions import KNOWN, questions
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError, InvalidParameterError

if TYPE_CHECKING:
    from glm_multiuser.answer import GenerationResult
    from glm_multiuser.llm import MultiUserLLM

GOLDEN = package_data.ROOT / package_data.GOLDEN
USERS = 8
SEQ_LENGTH = 256
CHOSEN = (
    *("users", "seq_length", "users_per_cell"),
    *("dtype", "weight_dtype", "compute_dtype", "cache_dtype"),
)
"""Settings that the checks set."""
KNOWN_ANSWERS = 10
LOGPROB_TOLERANCE = 1e-3

Outcome = tuple[Optional[bool], str]
"""Whether a check passed, None if it could not run, and its message."""

STYLES = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """One line of the report; `status` is "ok", "FAILED" or "skipped"."""

    name: str
    status: str
    detail: str


@takes_options(EngineConfig, without=CHOSEN)
def command(
    checkpoint: Checkpoint = loading.DEFAULT_CHECKPOINT,
    golden: Annotated[
        Path,
        typer.Option(
            help="Golden folder: a small model with its expected logits.",
            show_default=f"{package_data.GOLDEN}, part of the package",
        ),
    ] = GOLDEN,
    **settings: Any,
) -> None:
    """Check this machine: golden logits, known answers, isolation, compiled graphs.

    Takes under a minute. The exit code is 1 if a check fails; a check that cannot run here is
    "skipped", with the reason.
    """
    if not (golden / "expected.json").is_file():
        raise ConfigError(f"golden is {golden}; it must be a folder with a model and expected.json")
    engine = EngineConfig(users=USERS, seq_length=SEQ_LENGTH, **settings)
    folder = loading.find_checkpoint(checkpoint, engine.check_fits)
    loading.check_engine(folder, engine)
    results = []
    for result, seconds in timed(run_checks(folder, golden, **settings)):
        screen.notice(f"{result.status:8}{result.name} ({seconds:.1f} s)")
        results.append(result)
    print_report(results)
    if any(result.status == "FAILED" for result in results):
        raise typer.Exit(1)


def timed(checks: Iterator[CheckResult]) -> Iterator[tuple[CheckResult, float]]:
    """Yields every result with its duration in seconds."""
    started = time.perf_counter()
    for result in checks:
        yield result, time.perf_counter() - started
        started = time.perf_counter()


def run_checks(folder: Path, golden: Path, **settings: Any) -> Iterator[CheckResult]:
    """Runs all checks; one that raises counts as failed, and the next ones still run."""
    yield guarded("golden logits", lambda: golden_logits(golden, **settings))
    try:
        llm = loading.open_llm(folder, users=USERS, seq_length=SEQ_LENGTH, **settings)
    except Exception as error:
        yield CheckResult("start", "FAILED", one_line(error))
        return
    yield CheckResult("start", "ok", f"{folder} is ready for {USERS} users")
    with llm:
        yield CheckResult("kernels", "ok", kernels_of(llm))
        for name, check in MODEL_CHECKS.items():
            yield guarded(name, lambda check=check: check(llm, folder))  # type: ignore[misc]


def kernels_of(llm: "MultiUserLLM") -> str:
    """Returns the kernels in use, and their instruction set."""
    stats = llm.stats()
    if stats.kernels == "native":
        return f"native, {stats.kernel_level}"
    return "MindSpore's own operators"


def guarded(name: str, check: Callable[[], Outcome]) -> CheckResult:
    """Runs one check; its outcome None means that it could not run here."""
    try:
        good, detail = check()
    except Exception as error:  # a broken check is a result, and the others must still run
        return CheckResult(name, "FAILED", one_line(error))
    status = "skipped" if good is None else "ok" if good else "FAILED"
    return CheckResult(name, status, detail)


def one_line(error: Exception) -> str:
    """Returns the error's message without the stacks that MindSpore appends."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def golden_logits(golden: Path, **settings: Any) -> Outcome:
    """Compares greedy tokens exactly, and the first token's log-probabilities, of golden cases."""
    import numpy

    cases = json.loads((golden / "expected.json").read_text(encoding="utf-8"))["cases"]
    with numpy.load(golden / "expected.npz") as expected:
        # Only ChatGLM-6B has more than one kind of numerics.
        kind = "fp32/" if f"{cases[0]['index']}/fp32/last_logits" in expected else ""
        logits = [expected[f"{case['index']}/{kind}last_logits"] for case in cases]
    screen.notice(f"loading {golden} and compiling its graphs for 2 users ...")
    # The golden values are float32; half precision could only be compared loosely.
    with loading.llm_class().from_pretrained(
        str(golden),
        users=2,
        seq_length=SEQ_LENGTH,
        dtype="float32",
        **settings,
    ) as llm:
        each = [
            loading.sampling_params(
                temperature=0.0, max_tokens=case["n_new"], ignore_eos=True, logprobs=5
            )
            for case in cases
        ]
        results = llm.generate([case["input_ids"] for case in cases], each)
    distances = [logprob_distance(result, row) for result, row in zip(results, logits)]
    wrong = [
        case["name"]
        for case, result, distance in zip(cases, results, distances)
        if list(result.token_ids) != case["greedy"] or not distance <= LOGPROB_TOLERANCE
    ]
    detail = f"{tally(cases, wrong, 'cases')}; log-probabilities within {max(distances):.1e}"
    return not wrong, detail


def logprob_distance(result: "GenerationResult", logits: Any) -> float:
    """Returns the error of the first token's top log-probabilities against those of `logits`."""
    if not result.logprobs:
        return math.inf
    values = [float(value) for value in logits]
    highest = max(values)
    total = highest + math.log(math.fsum(math.exp(value - highest) for value in values))
    best = result.logprobs[0].top
    return max(abs(logprob - (values[token] - total)) for token, logprob in best.items())


def tally(all_of_them: Sequence[Any], wrong: Sequence[str], what: str) -> str:
    """ "8 of 10 cases", and the names of the wrong ones."""
    good = f"{len(all_of_them) - len(wrong)} of {len(all_of_them)} {what}"
    return f"{good} (wrong: {', '.join(wrong)})" if wrong else good


def known_answers(llm: "MultiUserLLM", folder: Path) -> Outcome:
    """Checks glm-tiny's greedy answers against its training corpus."""
    if folder.resolve().name != loading.DEFAULT_CHECKPOINT.name:
        return None, f"{folder} is not glm-tiny: its answers are not known here"
    known = KNOWN[:KNOWN_ANSWERS]
    asked = [ChatAnswer(f"user {place}", one.question) for place, one in enumerate(known)]
    # No more at once than slots: with --max-queue 0, the rest would be rejected.
    groups = [asked[first : first + USERS] for first in range(0, len(asked), USERS)]
    answers = [answer for group in groups for answer in chat_together(llm, group, greedy(160))]
    wrong = [
        answer.question
        for answer, one in zip(answers, known)
        if answer.error or answer.text.strip() != one.answer
    ]
    errors = [answer.error for answer in answers if answer.error]
    return not wrong, "; ".join([tally(answers, wrong, "answers as learned"), *errors[:1]])


def isolation(llm: "MultiUserLLM", folder: Path) -> Outcome:
    """Checks that eight concurrent users get the same tokens as alone: greedy, and with a seed."""
    try:
        llm.prompt_token_ids(questions(1)[0])
    except InvalidParameterError as error:
        return None, str(error)
    pairs: list[tuple[ChatAnswer, ChatAnswer]] = []
    sampled = loading.sampling_params(max_tokens=32, temperature=0.9, top_p=0.9, seed=7)
    for params in (greedy(32), sampled):
        asked = [ChatAnswer(f"user {place}", text) for place, text in enumerate(questions(USERS))]
        together = chat_together(llm, asked, params)
        pairs += [(answer, chat_alone(llm, answer, params)) for answer in together]
    good = sum(same(*pair) for pair in pairs)
    detail = f"{good} of {len(pairs)} answers as the same user alone"
    errors = [answer.error for pair in pairs for answer in pair if answer.error]
    return good == len(pairs), "; ".join([detail, *errors[:1]])


def no_late_compiles(llm: "MultiUserLLM", folder: Path) -> Outcome:
    """Checks that no previous check compiled anything after the engine was ready."""
    stats = llm.stats()
    late = stats.compiles_after_ready
    return late == 0, f"{stats.compiles} graphs, {late} of them compiled after ready"


def batch_invariance(llm: "MultiUserLLM", folder: Path) -> Outcome:
    """Reports the engine's own check: a row's result does not depend on the other rows."""
    found = llm.stats().batch_invariant
    if found is None:
        return None, "the engine has not looked"
    return found, "rows are computed alike in every batch" if found else "rows depend on the batch"


def greedy(max_tokens: int) -> Any:
    return loading.sampling_params(max_tokens=max_tokens, temperature=0.0)


MODEL_CHECKS: dict[str, Callable[[Any, Path], Outcome]] = {
    "known answers": known_answers,
    "isolation": isolation,
    "compiles after ready": no_late_compiles,
    "batch invariance": batch_invariance,
}


def print_report(results: list[CheckResult]) -> None:
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for result in results:
        table.add_row(result.name, Text(result.status, STYLES[result.status]), Text(result.detail))
    screen.output().print(table)
