"""The command `serve` with a fault built in: `python -m tests.server.faulty_server FAULT serve`.

Faults:
    nan: a prompt with `MARKER` finds NaN among its keys and values after its first token.
    held: the real model, whose steps a test may hold (`tests.server.held_steps`).
    slow: a model in numpy, which is there at once and then takes its time for every token.
    stuck: a model that takes for ever to load.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

MARKER = "☠"


def nan() -> None:
    """Of the real model, on the device."""
    import numpy as np

    from glm_multiuser.cli.loading import DEFAULT_CHECKPOINT, find_checkpoint
    from glm_multiuser.engine.native import NativeRunner, read_cache, write_cache
    from glm_multiuser.engine.runner import DeviceResults
    from glm_multiuser.engine.scheduler import Step
    from glm_multiuser.tokenizers import ChatGLMTokenizer

    tokenizer = ChatGLMTokenizer.from_folder(find_checkpoint(DEFAULT_CHECKPOINT))
    marker = set(tokenizer.encode(MARKER)[-3:])
    run = NativeRunner.run

    def poisoned(runner: NativeRunner, step: Step) -> DeviceResults:
        results = run(runner, step)
        for slot, piece in step.prompts.items():
            if marker <= set(piece.request.prompt_token_ids):
                past = read_cache(runner.model, slot, runner.engine.seq_length)
                write_cache(runner.model, slot, [np.full_like(one, np.nan) for one in past])
        return results

    NativeRunner.run = poisoned  # type: ignore[method-assign, assignment]


def held() -> None:
    import os

    from glm_multiuser.engine.native import NativeRunner
    from glm_multiuser.engine.runner import DeviceResults
    from glm_multiuser.engine.scheduler import Step
    from tests.server.held_steps import VARIABLE

    # It opens at once, and reads block as soon as somebody holds the other end.
    steps = os.open(os.environ[VARIABLE], os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(steps, True)
    run = NativeRunner.run

    def run_when_let(runner: NativeRunner, step: Step) -> DeviceResults:
        os.read(steps, 1)
        return run(runner, step)

    NativeRunner.run = run_when_let  # type: ignore[method-assign, assignment]


def slow() -> None:
    from glm_multiuser.server import run
    from tests.server.in_process import mock_llm

    def before(call: Any) -> None:
        threading.Event().wait(0.05)

    run.serve = partial(run.serve, open_llm=partial(mock_llm, before=before))


def stuck() -> None:
    from glm_multiuser.server import run

    def open_llm(settings: Any, progress: Any, **options: Any) -> Any:
        while True:
            progress(1, 2, "nothing")
            threading.Event().wait(0.01)

    run.serve = partial(run.serve, open_llm=open_llm)


if __name__ == "__main__":
    {"nan": nan, "held": held, "slow": slow, "stuck": stuck}[sys.argv.pop(1)]()

    from glm_multiuser.cli import main

    main()
