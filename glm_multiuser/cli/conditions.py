"""The conditions under which something was measured: no number should be without them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Optional

from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.loading import find_checkpoint, installed
from glm_multiuser.server.available_memory import total_bytes

OF_A_RUN = ("users", "max_queue")
"""Settings that differ between the runs of a benchmark."""

NO_SETTING = ("weight_types",)
"""What an engine has besides its settings."""


def machine() -> dict[str, Any]:
    """The computer, how busy it is, and the versions of what runs on it."""
    # Fewer than the machine has, where a container or a batch system grants only some.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "memory_gb": memory_gb(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("mindspore", "numpy", "glm_multiuser")},
    }


def workload(settings: RunSettings) -> dict[str, Any]:
    """The model and what it is asked."""
    from glm_multiuser import backend_choice
    from glm_multiuser.checkpoint import stored_as

    config, engine = settings.model_config(), settings.engine()
    if settings.checkpoint is not None:
        folder = find_checkpoint(Path(settings.checkpoint))
        stored = stored_as(folder, config)
        engine = backend_choice.with_weight_dtype(engine, config, *stored)
    else:
        engine = backend_choice.with_weight_dtype(engine, config, "float32")
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
    """The CPU's model name; Linux does not tell it to `platform`."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_gb() -> Optional[float]:
    """GiB of this machine, or of the container that this runs in."""
    total = total_bytes()
    return None if total is None else round(total / (1 << 30), 1)
