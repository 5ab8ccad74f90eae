"""All device-dependent choices."""

from __future__ import annotations

import os

from glm_multiuser.cgroups import cpu_limit
from glm_multiuser.errors import ConfigError

DEFAULT_DTYPE = {"CPU": "float32", "Ascend": "float16"}
"""On CPUs a float16 matrix product is ten times slower than a float32 one; an Ascend 910A computes
in float16 and does not support bfloat16."""

WEIGHT_FIRST_ROWS = {"CPU": 128, "Ascend": 0}
"""Maximum rows for `weight @ x.T` instead of `x @ weight.T`, with weights [out, in]. With AVX-512,
it is 1.6 to 1.8 times as fast for 12 to 48 rows, 1.1 times at 128, not faster from 256 on. Ascend
uses the usual form, without measurement."""

PREFILL_CHUNK = {"CPU": 32, "Ascend": 256}
"""Chunk length of a causal model's prompts between two decode steps of other users."""

PREFILL_CHUNK_NATIVE = 256
"""Prompt tokens of a causal model per step of native kernels while no user decodes; more are not
faster. While others decode, `ChunkLength` determines their number."""

PROMPT_LOGITS = 32
"""Rows of logits in a step of native kernels for prompt log-probabilities, besides one per user.
Reading all weights costs about as much as this many rows."""

PREFILL_CHUNK_LAYERWISE = 32
"""Tokens of ChatGLM-6B's prompts that one step computes in all layers."""

PROCESS_BYTES = {"CPU": 224 * 2**20, "Ascend": 0}
"""For memory plans: Python, MindSpore, a compiled graph and allocator overhead, measured on CPUs
with native kernels. For cards this is host memory; MindSpore's own use of card memory has not been
measured."""


def cores() -> int:
    """Number of CPU cores that this process may use, or whose time its cgroup allows."""
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux
    found = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(found, cpu_limit() or found)


_configured: list[tuple[str, int]] = []


def configure(device_target: str, device_id: int) -> None:
    """Sets the device of this process; called on the device thread.

    Raises:
        ConfigError: the process already runs on another device, or MindSpore has no such device.
    """
    import mindspore as ms

    if _configured:
        if _configured[0] != (device_target, device_id):
            raise ConfigError(
                f"device_target is {device_target!r} with device_id {device_id}; this process "
                f"already runs on {_configured[0]} and MindSpore allows one device per process"
            )
        return
    try:
        ms.set_context(mode=ms.GRAPH_MODE)
        ms.set_device(device_target, device_id)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device_target is {device_target!r}; MindSpore says: {error}") from error
    _configured.append((device_target, device_id))
