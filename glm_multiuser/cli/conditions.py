"""The conditions of a measurement, reported with its numbers."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Optional

from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.loading import find_checkpoint
from glm_multiuser.server.available_memory import total_bytes
from glm_multiuser.version import installed_version

OF_A_RUN = ("users", "max_queue")
"""Settings that differ between the runs of a benchmark."""

NO_SETTING = ("weight_types",)
"""Fields of an engine that are not settings."""


def machine() -> dict[str, Any]:
    """Describes the computer, its load, and software versions."""
    # Containers and batch systems may grant fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "memory_gb": memory_gb(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("mindspore", "numpy", "glm_multiuser")},
    }


def workload(settings: RunSettings) -> dict[str, Any]:
    """Describes the model and its load."""
    from glm_multiuser import backend_choice
    from glm_multiuser.checkpoint import stored_as

    config, engine = settings.model_config(), settings.engine()
    stored: tuple[str, dict[str, str]] = ("float32", {})
    if settings.checkpoint is not None:
        stored = stored_as(find_checkpoint(Path(settings.checkpoint)), config)
    engine = backend_choice.with_weight_dtype(engine, config, *stored)
    types = {
        "dtype": backend_choice.dtype_of(engine),
        "weight_dtype": backend_choice.weight_dtype_of(engine),
        "cache_dtype": backend_choice.cache_dtype_of(engine),
        "kernels": "native" if backend_choice.is_native(engine) else "portable",
    }
    values = {**vars(engine), **types}
    return {
        **{name: value for name, value in values.items() if name not in OF_A_RUN + NO_SETTING},
        "weights": "checkpoint" if settings.checkpoint else "random",
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "inner_hidden_size": config.inner_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "repeat": settings.repeat,
        "sampling": "greedy, end of sequence ignored",
    }


def cpu_name() -> str:
    """Returns the CPU's model name, which `platform` lacks on Linux."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_gb() -> Optional[float]:
    """Returns the memory of this machine or container, in GiB."""
    total = total_bytes()
    return None if total is None else round(total / (1 << 30), 1)
