"""Loads a model: checks that it fits, opens it with progress, and warms it up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser import backend_choice, memory
from glm_multiuser.checkpoint import read_model_config, stored_as
from glm_multiuser.checkpoint.hub import local_path
from glm_multiuser.errors import ConfigError
from glm_multiuser.garbage import leave_out_imports
from glm_multiuser.progress import Progress
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.server.available_memory import available_bytes
from glm_multiuser.server.logs import show_or_log_progress
from glm_multiuser.server.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
LOG_SECONDS = 2.0
"""Interval of log lines about progress, without a terminal for a progress bar."""

OpenLLM = Callable[..., "MultiUserLLM"]


def open_llm(settings: ModelSettings, progress: Optional[Progress] = None) -> MultiUserLLM:
    """`MultiUserLLM.from_pretrained`; imported late, because it imports MindSpore."""
    from glm_multiuser.llm import MultiUserLLM

    leave_out_imports()
    return MultiUserLLM.from_pretrained(settings.folder, progress=progress, **vars(settings.engine))


def with_local_paths(server: ServerSettings) -> ServerSettings:
    """Downloads models given by a hub's name, and returns settings with their paths; blocks.

    Raises:
        GLMMultiUserError: a model cannot be downloaded, or does not fit its engine settings.
    """
    paths = [local_path(model.folder, model.engine.check_fits) for model in server.models]
    models = (replace(model, folder=path) for model, path in zip(server.models, paths))
    return replace(server, models=tuple(models))


def bring_up(
    model: ModelSettings, server: ServerSettings, progress: Progress, open_llm: OpenLLM
) -> MultiUserLLM:
    """Opens a model and warms it up; blocks.

    Raises:
        GLMMultiUserError: it cannot be opened, or a warm-up prompt fails.
    """
    with _shown(model.name, progress) as report:
        llm = open_llm(model, progress=report)
        try:
            warm_up(llm, server.warm_up, report)
        except BaseException:
            llm.close(drain=0.0)
            raise
    return llm


def warm_up(llm: MultiUserLLM, prompts: Iterable[str], progress: Progress) -> None:
    """Generates a few tokens for every prompt.

    Raises:
        GLMMultiUserError: a prompt is rejected, or fails.
    """
    texts: list[Any] = list(prompts) if llm.tokenizer is not None else [[0, 1, 2]]
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS)
    for done, prompt in enumerate(texts):
        progress(done, len(texts), "warm-up prompts")
        (result,) = llm.generate([prompt], params)
        if result.error is not None:
            raise result.error


def check(
    model: ModelSettings,
    others: Iterable[ModelSettings],
    server: ServerSettings,
    replaced: Optional[ModelSettings] = None,
) -> None:
    """Checks, before loading, whether a model can work.

    Args:
        model: the model to load.
        others: loaded models that stay loaded.
        server: has the memory budget.
        replaced: current settings of the same model if it is loaded; its memory is freed first.

    Raises:
        CheckpointError: the checkpoint has no configuration.
        ConfigError: the engine settings do not fit the model, or there is not enough memory.
    """
    model.engine.check_fits(read_model_config(model.folder))
    needed = memory_bytes(model)
    available = available_bytes() if model.engine.device_target == "CPU" else None
    if available is not None:
        available += memory_bytes(replaced) if replaced is not None else 0
        if needed > available:
            raise ConfigError(
                f"model {model.name!r} needs {needed / 2**20:.1f} MiB for its weights and caches, "
                f"with users {model.engine.users} and seq_length {model.engine.seq_length}; "
                f"{available / 2**20:.1f} MiB are available"
            )
    if server.memory_gib is None:
        return
    limit = server.memory_gib * 2**30
    taken = sum(memory_bytes(other) for other in others)
    if needed + taken > limit:
        raise ConfigError(
            f"model {model.name!r} needs {needed / 2**20:.1f} MiB for its weights and caches; "
            f"{taken / 2**20:.1f} of {limit / 2**20:.1f} MiB are taken"
        )


def memory_bytes(model: ModelSettings) -> int:
    """Bytes of weights and KV caches, computed from the checkpoint's shapes and dtypes."""
    config = read_model_config(model.folder)
    stored = stored_as(model.folder, config)
    engine = backend_choice.with_weight_dtype(model.engine, config, *stored)
    return memory.total_bytes(config, engine)


@contextmanager
def _shown(name: str, progress: Progress) -> Iterator[Progress]:
    """Wraps `progress`: also shows a progress bar on a terminal, or else logs it."""
    with show_or_log_progress(logger, "loading", LOG_SECONDS, model=name) as show:

        def report(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            show(done, total, what)

        yield report
