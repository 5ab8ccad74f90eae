"""Every choice that depends on the device is made here and nowhere else."""

from __future__ import annotations

import os

from glm_multiuser.errors import ConfigError

DEFAULT_DTYPE = {"CPU": "float32", "Ascend": "float16"}
"""On CPU a float16 matrix product is ten times slower than a float32 one; an Ascend 910A computes
in float16 and knows no bfloat16."""

WEIGHT_FIRST_ROWS = {"CPU": 128, "Ascend": 0}
"""`weight @ x.T` against `x @ weight.T`, both with weights [out, in], measured with AVX-512: 1.6 to
1.8 times as fast for 12 to 48 rows, 1.1 times at 128, not faster from 256 on. Ascend gets the usual
form, which has not been measured there."""

PREFILL_CHUNK = {"CPU": 32, "Ascend": 256}
"""Tokens of a causal model's prompt that are prefilled between two decode steps of the others."""

PREFILL_CHUNK_NATIVE = 256
"""Tokens of a causal model's prompts in one step of native kernels while no user decodes: more do
not make prompts faster. How many there are beside others' next tokens, `ChunkLength` measures."""

PROMPT_LOGITS = 32
"""Rows of logits in a step of native kernels besides one for each user, for log-probabilities of
prompts. Reading all weights costs about as much as that many rows."""

PREFILL_CHUNK_LAYERWISE = 32
"""Tokens of ChatGLM-6B's prompts that one step takes through all layers."""

PROCESS_BYTES = {"CPU": 224 * 2**20, "Ascend": 0}
"""For plans: Python, MindSpore, a compiled graph, and what the allocator keeps, measured on CPUs
with native kernels. For a card that is the host's memory; what MindSpore takes of the card's own
has not been measured."""


def cores() -> int:
    """Those of the CPU that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


_configured: list[tuple[str, int]] = []


def configure(device_target: str, device_id: int) -> None:
    """Chooses the device of this process; called on the thread that owns it.

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
