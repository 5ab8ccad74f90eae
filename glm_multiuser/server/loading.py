"""Bringing one model up: does it fit, open it, show how far it is, and let it answer once."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable

from glm_multiuser import memory
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.progress import Progress, show_progress
from glm_multiuser.sampling import SamplingParams
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
LOG_SECONDS = 2.0
"""Between two lines about the progress of a load, where there is no terminal for a bar."""

OpenLLM = Callable[..., "MultiUserLLM"]


def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """`MultiUserLLM.from_pretrained`; imported late, because it brings MindSpore in."""
    from glm_multiuser.llm import MultiUserLLM

    return MultiUserLLM.from_pretrained(
        settings.folder,
        users=settings.users,
        seq_length=settings.seq_length,
        max_queue=settings.max_queue,
        prefill_chunk=settings.prefill_chunk,
        cache_prompt=settings.cache_prompt,
        **options,
    )


def bring_up(
    model: ModelSettings, server: ServerSettings, progress: Progress, open_llm: OpenLLM
) -> MultiUserLLM:
    """Opens a model and lets it answer the warm-up prompts; for a thread that may wait.

    Raises:
        GLMMultiUserError: it cannot be opened, or does not answer.
    """
    with _shown(model.name, progress) as report:
        llm = open_llm(
            model,
            device_target=server.device_target,
            device_id=server.device_id,
            kernels=server.kernels,
            weight_dtype=server.weight_dtype,
            progress=report,
        )
        try:
            warm_up(llm, server.warm_up, report)
        except BaseException:
            llm.close(drain=0.0)
            raise
    return llm


def warm_up(llm: MultiUserLLM, prompts: Iterable[str], progress: Progress) -> None:
    """Every prompt once, one after the other.

    Raises:
        GLMMultiUserError: a prompt is refused, or its answer fails.
    """
    texts: list[Any] = list(prompts) if llm.tokenizer is not None else [[0, 1, 2]]
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS)
    for done, prompt in enumerate(texts):
        progress(done, len(texts), "warm-up prompts")
        (result,) = llm.generate([prompt], params)
        if result.error is not None:
            raise result.error


def check(model: ModelSettings, others: Iterable[ModelSettings], server: ServerSettings) -> None:
    """Refuses what can be known not to work before anything is loaded.

    Raises:
        CheckpointError: no configuration.
        ConfigError: a size out of its range, or no memory left by `others`.
    """
    engine = EngineConfig(
        model.users,
        model.seq_length,
        model.max_queue,
        prefill_chunk=model.prefill_chunk,
        kernels=server.kernels,
        weight_dtype=server.weight_dtype,
    )
    engine.check_fits(read_model_config(model.folder))
    limit = server.memory_bytes
    if limit is None:
        return
    needed = memory_bytes(model, server)
    taken = sum(memory_bytes(other, server) for other in others)
    if needed + taken > limit:
        raise ConfigError(
            f"model {model.name!r} needs {needed / 2**20:.1f} MiB for its weights and caches; "
            f"{taken / 2**20:.1f} of {limit / 2**20:.1f} MiB are taken"
        )


def memory_bytes(model: ModelSettings, server: ServerSettings) -> int:
    """Weights and caches, computed from the checkpoint's `config.json`."""
    engine = EngineConfig(
        users=model.users,
        seq_length=model.seq_length,
        kernels=server.kernels,
        weight_dtype=server.weight_dtype,
        device_target=server.device_target,
    )
    return memory.total_bytes(read_model_config(model.folder), engine)


@contextmanager
def _shown(name: str, progress: Progress) -> Iterator[Progress]:
    """`progress`, and beside it a bar on a terminal, or now and then a line in the log."""
    logged = time.monotonic()

    def log(done: int, total: int, what: str) -> None:
        nonlocal logged
        if time.monotonic() - logged < LOG_SECONDS:
            return
        logged = time.monotonic()
        fields = {"model": name, "done": done, "total": total, "what": what}
        logger.info("loading", extra={FIELDS: fields})

    with show_progress(None if sys.stderr.isatty() else log) as show:

        def report(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            show(done, total, what)

        yield report
