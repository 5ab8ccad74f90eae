"""Many threads share one MindFormers GLM: each thread is a user and prints its own stream.

    pip install -e '.[mindformers]'
    python examples/mindformers_multi_thread.py --users 4

`enable` patches the installed MindFormers in memory; its files do not change. One `GLMChatModel`
then has a KV cache per user, and `_stream_chat` is a generator of text that many threads run
concurrently: `qi` identifies the user, `tlock` is one lock for all of them. All users share one
pair of compiled graphs, which run for one user at a time.

Each output line is a piece of an answer: the user, seconds since the threads started, and the text
as a Python string. The answers of ckpt/glm-tiny are known word for word, so the correct ones are
counted at the end. --checkpoint takes any other ChatGLM-6B in Hugging Face layout, or a folder with
MindFormers' `.ckpt` (`glm-multiuser convert` makes one from the other).
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from glm_multiuser import GLMMultiUserError, ModelConfig
from glm_multiuser.checkpoint.mindformers_arguments import glm_config_arguments
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench_run import users_text
from glm_multiuser.cli.interrupts import keep_ctrl_c
from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT, find_checkpoint
from glm_multiuser.cli.questions import KNOWN, Known
from glm_multiuser.device import DEFAULT_DTYPE, configure
from glm_multiuser.mindformers import enable
from glm_multiuser.progress import show_progress

LOCK = threading.Lock()
"""`tlock`: MindSpore runs one graph at a time."""

PRINTING = threading.Lock()
"""`print` writes a text and the end of its line separately."""


class Turn(NamedTuple):
    """One finished answer."""

    user: int
    known: Known
    answer: str
    tokens: int
    seconds: float
    first_seconds: float


class TokenCounter:
    """A MindFormers streamer: receives the prompt first, then every token."""

    tokens = -1

    def put(self, token_ids: Any) -> None:
        self.tokens += 1

    def end(self) -> None:
        pass


def open_model(folder: Path, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """MindFormers' own model and tokenizer, with one user per thread."""
    config = ModelConfig.from_folder(folder)
    dtype = DEFAULT_DTYPE[arguments.device_target]
    settings = glm_config_arguments(config, arguments.seq_length, dtype)

    screen.notice("importing MindSpore and MindFormers ...")
    os.environ.setdefault("GLOG_v", "3")  # MindSpore: errors, no warnings
    enable(users=arguments.users)
    from mindformers import ChatGLMTokenizer, GLMChatModel, GLMConfig
    from mindformers.tools.logger import get_logger

    from glm_multiuser.mindformers.weights import load_weights

    # MindFormers: no INFO between the streams, no log files. Only the first call takes effect.
    get_logger(stdout_level="WARNING", file_level=(), file_name=())

    screen.notice(f"loading {folder} for {users_text(arguments.users)} ...")
    configure(arguments.device_target, arguments.device_id)
    model = GLMChatModel(GLMConfig(**settings))
    model.set_train(False)
    with show_progress(None) as progress:
        load_weights(model, folder, config, progress)
    tokenizer = ChatGLMTokenizer.from_pretrained(str(folder))

    screen.notice("compiling the two graphs that all users share ...")
    stream, _ = ask(model, tokenizer, 0, KNOWN[0].question, arguments.max_length)
    for _ in zip(range(2), stream):
        pass  # the first token uses the prefill graph, the second the decode graph
    return model, tokenizer


def ask(
    model: Any, tokenizer: Any, user: int, question: str, max_length: int
) -> tuple[Iterator[str], TokenCounter]:
    """The text of the answer as it grows, and a counter of its tokens."""
    counter = TokenCounter()
    stream = model._stream_chat(
        tokenizer(question)["input_ids"],
        top_k=1,
        top_p=1.0,
        repetition_penalty=1.0,
        max_length=max_length,
        eos_token_id=tokenizer.eos_token_id,
        streamer=counter,
        tokenizer=tokenizer,
        tlock=LOCK,
        qi=user,
    )
    return stream, counter


def talk(
    model: Any, tokenizer: Any, user: int, max_length: int, started: float, turns: list[Turn]
) -> None:
    """One user, in its own thread."""
    known = KNOWN[user % len(KNOWN)]
    stream, counter = ask(model, tokenizer, user, known.question, max_length)
    answer = ""
    asked = time.perf_counter()
    first = asked
    for piece in stream:
        now = time.perf_counter()
        first = first if answer else now
        answer += piece
        with PRINTING:
            print(f"user {user:2}  {now - started:7.2f} s  {piece!r}", flush=True)
    ended = time.perf_counter()
    turns.append(Turn(user, known, answer, counter.tokens, ended - asked, first - asked))


def print_summary(turns: list[Turn], seconds: float) -> None:
    """Prints results per user, then in total."""
    print(f"\n{'user':>4} {'tokens':>7} {'tok/s':>7} {'first text':>11}  answer")
    for turn in sorted(turns):
        verdict = "as known" if turn.answer == turn.known.answer else "not as known"
        print(
            f"{turn.user:4} {turn.tokens:7} {turn.tokens / turn.seconds:7.1f} "
            f"{turn.first_seconds:9.2f} s  {verdict}: {turn.known.question}"
        )
    total = sum(turn.tokens for turn in turns)
    right = sum(turn.answer == turn.known.answer for turn in turns)
    print(
        f"\n{total} tokens for {len(turns)} users in {seconds:.2f} s: {total / seconds:.1f} tok/s"
    )
    print(f"{right} of {len(turns)} answers are, word for word, what glm-tiny learned")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256, help="what each user can hold")
    parser.add_argument("--max-length", type=int, default=256, help="prompt and answer, in tokens")
    parser.add_argument("--device-target", default="CPU", choices=list(DEFAULT_DTYPE))
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    arguments = parser.parse_args()

    try:
        model, tokenizer = open_model(find_checkpoint(arguments.checkpoint), arguments)
    except (GLMMultiUserError, ValueError) as error:
        screen.print_error(error)
        return 2
    turns: list[Turn] = []
    started = time.perf_counter()
    threads = [
        threading.Thread(
            target=talk,
            args=(model, tokenizer, user, arguments.max_length, started, turns),
            daemon=True,
        )
        for user in range(arguments.users)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print_summary(turns, time.perf_counter() - started)
    return 0 if len(turns) == arguments.users else 1


if __name__ == "__main__":
    keep_ctrl_c()  # before MindSpore is imported
    sys.exit(main())
