"""A fingerprint of everything but tokens that keys and values depend on."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mindspore as ms
import numpy as np
import xxhash
from mindspore import Parameter

from glm_multiuser.backends.native import library
from glm_multiuser.config import EngineConfig
from glm_multiuser.device import cores
from glm_multiuser.mindspore_internals import memory_of
from glm_multiuser.models.multi_user import MultiUserModel

LAYOUT = 1
"""Increment it if the layout of caches changes, and nothing else here does."""

CACHES = ("key_past", "value_past")


def fingerprint_of(model: MultiUserModel, engine: EngineConfig, kernel_level: str) -> str:
    """Equal if the same tokens have the same keys and values, bit for bit; 32 hexadecimal digits.

    Reads every weight once, which takes about a second for 10 GB.
    """
    weights = [one for one in model.get_parameters() if not one.name.endswith(CACHES)]
    weights.sort(key=lambda one: str(one.name))
    with ThreadPoolExecutor(cores()) as pool:
        digests = list(pool.map(_digest, weights))
    backend = model.backend
    depends_on: dict[str, Any] = {
        "layout": LAYOUT,
        "model": repr(model.config),
        "kernels": [backend.name, kernel_level, _kernels(backend.name)],
        "types": [backend.kept_as, engine.dtype, engine.compute_dtype, backend.cache_dtype],
        # With portable operators, rounding depends on how prompts are chunked.
        "portable": _portable(engine) if backend.name != "native" else None,
        "weights": [[str(one.name), digest] for one, digest in zip(weights, digests)],
    }
    text = json.dumps(depends_on, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(parameter: Parameter) -> str:
    memory = np.ascontiguousarray(memory_of(parameter))
    content = memory.reshape(-1).view(np.uint8).data
    return f"{memory.dtype} {memory.shape} {xxhash.xxh3_128_hexdigest(content)}"


def _kernels(backend: str) -> str:
    """Digest of the kernel library, or MindSpore's version."""
    if backend == "native":
        return xxhash.xxh3_128_hexdigest(library.PATH.read_bytes())
    return str(ms.__version__)


def _portable(engine: EngineConfig) -> list[Any]:
    """Settings that select graphs, and thereby the order of summation."""
    return [
        engine.device_target,
        engine.seq_length,
        engine.prefill_chunk,
        engine.batch_invariant,
        engine.users,
        engine.users_per_cell,
    ]
