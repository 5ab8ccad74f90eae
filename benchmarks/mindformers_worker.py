"""Worker process of mindformers_comparison.py: measures one variant at one number of users.

Reads one JSON object from stdin, {"variant": ..., "settings": the fields of `RunSettings`}; the
last line of stdout is another: the run, or {"error": ...}.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glm_multiuser.checkpoint.mindformers_arguments import glm_config_arguments
from glm_multiuser.cli import bench_run, loading, measure, screen
from glm_multiuser.cli.bench_run import RunSettings, users_text
from glm_multiuser.cli.bench_worker import answer_job
from glm_multiuser.cli.interrupts import keep_ctrl_c
from glm_multiuser.device import configure
from glm_multiuser.mindformers import enable
from glm_multiuser.progress import show_progress


class Piece(NamedTuple):
    """The attributes of an answer's piece that `measure.run_round` reads."""

    token_ids: list[int]


class IdsAsText:
    """A tokenizer whose text is the ids, so a text stream shows every token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


class MindFormersModel:
    """Adapts a MindFormers GLM to the part of `MultiUserLLM` that `measure.run_round` calls."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.number_of: dict[str, int] = {}

    def submit(self, prompt: Sequence[int], params: Any, user: str) -> Iterator[Piece]:
        if user not in self.number_of:  # no lock: each user is one thread
            self.number_of[user] = next(self.numbers)
        return self.stream(prompt, params.max_tokens, self.number_of[user])

    def stream(self, prompt: Sequence[int], new_tokens: int, number: int) -> Iterator[Piece]:
        for text in self.model._stream_chat(
            prompt,
            top_k=1,
            top_p=1.0,
            repetition_penalty=1.0,
            max_length=len(prompt) + new_tokens,
            eos_token_id=-1,  # never generated
            tokenizer=IdsAsText(),
            tlock=self.lock,
            qi=number,
        ):
            yield Piece([int(text)])


class Recorder:
    """Forwards requests, and records the latest answer of every user."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.answers: dict[str, list[int]] = {}

    def submit(self, prompt: Sequence[int], params: Any, user: str) -> Iterator[Any]:
        answer = self.answers[user] = []
        for piece in self.llm.submit(prompt, user=user, params=params):
            answer.extend(piece.token_ids)
            yield piece


def run_mindformers(
    settings: RunSettings, prompts: Sequence[Sequence[int]], graph_per_user: bool
) -> dict[str, Any]:
    """Ready when every user has run a prompt and one more token: with int users, the last graph is
    compiled only then."""
    os.environ.setdefault("GLOG_v", "3")  # MindSpore: errors, no warnings
    enable(users=settings.users)
    from mindformers import GLMChatModel, GLMConfig
    from mindformers.tools.logger import get_logger

    from glm_multiuser.mindformers.weights import load_weights

    # MindFormers: warnings and above, no log files. Only the first call takes effect.
    get_logger(stdout_level="WARNING", file_level=(), file_name=())

    config, options = settings.model_config(), settings.options
    arguments = glm_config_arguments(config, settings.seq_length, options["dtype"])
    started = time.perf_counter()
    configure(options["device_target"], options["device_id"])
    with show_progress(None) as progress:
        network = GLMChatModel(GLMConfig(**arguments, graph_per_user=graph_per_user))
        network.set_train(False)
        load_weights(network, Path(str(settings.checkpoint)), config, progress)
        model = MindFormersModel(network)
        peaks = [measure.peak_rss_mb()]
        for number, prompt in enumerate(prompts):
            progress(number, settings.users, f"first two tokens of user {number}")
            list(model.stream(prompt, 2, number))
            peaks.append(measure.peak_rss_mb())
    start_seconds = time.perf_counter() - started
    # Overestimates for a single user, whose memory includes the shared part.
    per_user = (peaks[-1] - peaks[1]) / (len(peaks) - 2) if len(peaks) > 2 else peaks[1] - peaks[0]
    return {
        **measured(model, settings, prompts),
        "start_s": round(start_seconds, 3),
        "peak_rss_mb": round(measure.peak_rss_mb(), 1),
        "mb_per_user": round(per_user, 1),
    }


def run_engine(settings: RunSettings, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Ready when `MultiUserLLM` returns."""
    with bench_run.open_engine(settings) as llm:
        return {
            **measured(llm, settings, prompts),
            "gaps": gaps(llm, settings, prompts),
            "start_s": round(llm.stats().start_seconds, 3),
            "peak_rss_mb": round(measure.peak_rss_mb(), 1),
            "mb_per_user": None,
        }


def gaps(
    llm: Any, settings: RunSettings, prompts: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    """Lead of each token over the second best, as a difference of log-probabilities."""
    params = loading.sampling_params(
        max_tokens=settings.new_tokens, temperature=0.0, ignore_eos=True, logprobs=2
    )
    found = {}
    for number, result in enumerate(llm.generate(prompts, params)):
        best_two = [sorted(token.top.values()) for token in result.logprobs]
        found[measure.user_name(number)] = [best - second for second, best in best_two]
    return found


def measured(llm: Any, settings: RunSettings, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Runs a warm-up round, then the measured ones; returns the figures and the answers."""
    recorder: Any = Recorder(llm)
    rounds = []
    with screen.progress_bar() as bar:
        total = settings.users * settings.new_tokens
        task = bar.add_task(f"{users_text(settings.users)}: tokens", total=total)
        for number in range(settings.repeat + 1):
            tokens = settings.new_tokens
            if number == 0:
                tokens = min(measure.WARM_UP_TOKENS, tokens)
            params = loading.sampling_params(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            rounds.append(
                measure.run_round(
                    recorder, prompts, params, lambda read: bar.update(task, completed=read)
                )
            )
    seen = measure.summary(rounds[1:])
    worst = max(one.first_token_seconds for requests in rounds[1:] for one in requests)
    return {
        "tok_s": seen["tok_s"],
        "decode_tok_s": seen["decode_tok_s"],
        "ttft_ms": {"p50": seen["ttft_ms"]["p50"], "worst": round(1000 * worst, 3)},
        "answers": recorder.answers,
    }


def run(variant: str, settings: RunSettings) -> dict[str, Any]:
    prompts = bench_run.prompts_of(settings)
    if variant == "engine":
        return run_engine(settings, prompts)
    return run_mindformers(settings, prompts, graph_per_user=variant == "int")


if __name__ == "__main__":
    keep_ctrl_c()
    sys.exit(answer_job(lambda job: run(job["variant"], RunSettings(**job["settings"]))))
