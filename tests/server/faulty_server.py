"""The `serve` command with injected faults: `python -m tests.server.faulty_server FAULTS serve`.

Faults, comma-separated:
    nan: a prompt with `MARKER` gets NaN in its KV cache after its first token.
    held: the real model, with steps that a test can block (`tests.server.held_steps`).
    loading: the real model; the steps to block are its prefill graphs.
    mock: a numpy model, ready at once, with steps that a test can block.
    stuck: a model that never finishes loading.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

MARKER = "☠"


def nan() -> None:
    """Of the real model, on the device."""
    from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT, find_checkpoint
    from glm_multiuser.engine.native import HostResults, NativeRunner
    from glm_multiuser.engine.step import Step
    from glm_multiuser.tokenizers import ChatGLMTokenizer
    from tests.poison import poison

    tokenizer = ChatGLMTokenizer.from_folder(find_checkpoint(DEFAULT_CHECKPOINT))
    marker = set(tokenizer.encode(MARKER)[-3:])
    run = NativeRunner.run

    def poisoned(runner: NativeRunner, step: Step) -> HostResults:
        results = run(runner, step)
        for slot, piece in step.prompts.items():
            if marker <= set(piece.request.prompt_token_ids):
                poison(runner.model, slot)
        return results

    NativeRunner.run = poisoned  # type: ignore[method-assign, assignment]


def held() -> None:
    from glm_multiuser.engine.native import HostResults, NativeRunner
    from glm_multiuser.engine.step import Step
    from tests.server.held_steps import wait_for_steps

    run, wait = NativeRunner.run, wait_for_steps()

    def run_when_let(runner: NativeRunner, step: Step) -> HostResults:
        wait()
        return run(runner, step)

    NativeRunner.run = run_when_let  # type: ignore[method-assign, assignment]


def loading() -> None:
    from glm_multiuser.server import loading, run
    from tests.server.held_steps import wait_for_steps

    wait = wait_for_steps()

    def open_llm(settings: Any, progress: Any, **options: Any) -> Any:
        def tell(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            if "prefill" in what:
                wait()

        return loading.open_llm(settings, progress=tell, **options)

    run.serve = partial(run.serve, open_llm=open_llm)


def mock() -> None:
    from glm_multiuser.server import run
    from tests.server.held_steps import wait_for_steps
    from tests.server.in_process import mock_llm

    wait = wait_for_steps()
    run.serve = partial(run.serve, open_llm=partial(mock_llm, before=lambda call: wait()))


def stuck() -> None:
    from glm_multiuser.server import run

    def open_llm(settings: Any, progress: Any, **options: Any) -> Any:
        while True:
            progress(1, 2, "nothing")
            threading.Event().wait(0.01)

    run.serve = partial(run.serve, open_llm=open_llm)


if __name__ == "__main__":
    faults = {"nan": nan, "held": held, "loading": loading, "mock": mock, "stuck": stuck}
    for fault in sys.argv.pop(1).split(","):
        faults[fault]()

    from glm_multiuser.cli import main

    main()
