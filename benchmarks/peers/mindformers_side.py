"""Worker for MindFormers' own GLM, patched by this repository: a Tensor user, one user per call.

Its users wait for each other after their first token, so only decoding is measured.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from answering import Measure, answer, decode_rate

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from mindformers_worker import MindFormersModel, Piece

from glm_multiuser.checkpoint.mindformers_arguments import glm_config_arguments
from glm_multiuser.cli import bench_run, loading, measure
from glm_multiuser.device import configure
from glm_multiuser.mindformers import enable
from glm_multiuser.version import installed_version


class Together(MindFormersModel):
    """Holds second tokens back until every user has its first."""

    def __init__(self, model: Any, users: int) -> None:
        super().__init__(model)
        self.together = threading.Barrier(users)

    def submit(self, prompt: Sequence[int], params: Any, user: str) -> Iterator[Piece]:
        for number, piece in enumerate(super().submit(prompt, params, user)):
            yield piece
            if number == 0:
                self.together.wait()


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    """Ready after a prompt and one more token: all graphs are compiled then."""
    if installed_version("mindformers") == "not installed":
        raise RuntimeError("MindFormers is not installed in the environment of this benchmark")
    enable(users=job["users"])
    from mindformers import GLMChatModel, GLMConfig
    from mindformers.tools.logger import get_logger

    get_logger(stdout_level="WARNING", file_level=(), file_name=())
    seq_length = job["context"] + job["new_tokens"]
    settings = bench_run.RunSettings(
        users=job["users"],
        seq_length=seq_length,
        prompt_tokens=job["context"],
        new_tokens=job["new_tokens"],
        shape=job["shape"],
    )
    began = time.perf_counter()
    configure("CPU", 0)
    arguments = glm_config_arguments(settings.model_config(), seq_length, "float32")
    network = GLMChatModel(GLMConfig(**arguments, graph_per_user=False))
    network.set_train(False)
    model: Any = Together(network, job["users"])
    prompts = bench_run.prompts_of(settings)
    list(model.stream(prompts[0], 2, 0))
    params = loading.sampling_params(max_tokens=job["new_tokens"], temperature=0.0, ignore_eos=True)

    def once() -> dict[str, Any]:
        requests = measure.run_round(model, prompts, params)
        last = max(request.first_token_seconds for request in requests)
        tokens = [list(request.tokens) for request in requests]
        return {"decode_tok_s": decode_rate(tokens), "prefill_s": last}

    return {"start_s": round(time.perf_counter() - began, 1)}, once


if __name__ == "__main__":
    answer(start)
