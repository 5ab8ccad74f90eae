"""The minimum time of a decode step: the roofline (Williams et al. 2009) of a device.

A step reads every weight once, for any number of users, and every user's KV cache. The larger of
bytes / bandwidth and operations / compute is a bound, not a forecast: kernel launches, norms and
sampling come on top, and no device reaches its published peaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from glm_multiuser import backend_choice, memory
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.config import EngineConfig
from glm_multiuser.model_config import AnyModelConfig


@dataclass(frozen=True)
class Device:
    """Published data of a device.

    Attributes:
        target: "CPU" or "Ascend".
        memory: bytes; None if unknown.
        bandwidth: of that memory, bytes per second; None if unknown.
        compute: floating-point operations per second in float16; None if unknown.
    """

    target: str
    memory: Optional[int] = None
    bandwidth: Optional[float] = None
    compute: Optional[float] = None


DEVICES = {
    "910A": Device("Ascend", 32 * 2**30, 1.2e12, 256e12),
    "910B": Device("Ascend", 64 * 2**30, 1.6e12, 376e12),
    "CPU": Device("CPU"),
}
"""Published peaks, not measured. 910A: 256 TFLOPS and 32 GB of HBM2 as announced by Huawei in 2019,
about 1.2 TB/s. 910B has several variants; secondary sources give 256 to 400 TFLOPS, 32 or 64 GB,
and up to 1.6 TB/s."""


@dataclass(frozen=True)
class DecodeStep:
    """The bound of a step with one new token per user."""

    users: int
    bytes_read: int
    operations: int
    seconds: float
    bound: str
    """"memory" or "compute"."""

    @property
    def tokens_per_second(self) -> float:
        """Rate of all users together."""
        return self.users / self.seconds


def decode_step(
    config: AnyModelConfig,
    engine: EngineConfig,
    users: int,
    context: int,
    bandwidth: float,
    compute: float,
) -> DecodeStep:
    """Computes the bound of a step in which each of `users` users has `context` tokens.

    Args:
        config: of the model.
        engine: types of weights and caches.
        users: number of decoding users.
        context: cached tokens of each user.
        bandwidth: bytes per second.
        compute: floating-point operations per second.
    """
    per_token = memory.cache_bytes_per_user(config, 1, backend_choice.cache_dtype_of(engine))
    bytes_read = memory.weight_bytes_read(config, engine) + users * context * per_token
    operations = users * operations_per_token(config, context)
    reading, computing = bytes_read / bandwidth, operations / compute
    return DecodeStep(
        users,
        bytes_read,
        operations,
        max(reading, computing),
        "memory" if reading >= computing else "compute",
    )


def operations_per_token(config: AnyModelConfig, context: int) -> int:
    """Returns two per element of the matrices, and four per position that a query attends to."""
    shapes = parameter_shapes(config).values()
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    if not config.tied:
        matrices -= config.vocab_size * config.hidden_size
    attention = config.num_layers * config.num_attention_heads * config.head_dim * context
    return 2 * matrices + 4 * attention


def user_counts(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on up to `most`, and `most`."""
    powers = [1 << power for power in range(most.bit_length())]
    return [*powers, *([most] if most and most not in powers else [])]
