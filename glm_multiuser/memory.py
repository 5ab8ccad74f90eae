"""How much memory an engine takes, computed from its model's shape before anything is loaded.

Weights, caches and zeros are exact. What a step needs beside them is estimated in `workspace.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from glm_multiuser import workspace
from glm_multiuser.checkpoint.layouts import parameter_shapes
from glm_multiuser.config import BLOCK_LENGTH, AnyModelConfig, CausalConfig, EngineConfig
from glm_multiuser.device import DEFAULT_DTYPE, PROCESS_BYTES
from glm_multiuser.kernels import library
from glm_multiuser.kernels.packing import TILE, Packing

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
MOST_USERS = 1024
"""Users of one engine at most; the limit of `EngineConfig`."""


def compute_dtype(engine: EngineConfig) -> str:
    """What an engine computes in: its own type, or the device's."""
    return engine.dtype or DEFAULT_DTYPE[engine.device_target]


def is_native(engine: EngineConfig) -> bool:
    """Whether native kernels would be used; if it is for a CPU, on this machine."""
    return not why_not_native(engine)


def why_not_native(engine: EngineConfig) -> str:
    """Why they would not; "" if they would."""
    choice = library.portable_by_choice(engine.kernels, compute_dtype(engine))
    return choice or library.why_not(engine.device_target)


def check_kernels(engine: EngineConfig) -> None:
    """Raises ConfigError if it asks for what only native kernels can do, and cannot have them."""
    reason = why_not_native(engine)
    if reason:
        dtype = compute_dtype(engine)
        library.check_not_needed(engine.kernels, engine.weight_dtype, dtype, reason)


def weight_count(config: AnyModelConfig) -> int:
    """Numbers in the weights of a model of this shape; a tied output layer has none."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def weight_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """All weights as they lie in memory: for native kernels packed, with vectors in float32."""
    return sum(_parameter_bytes(shape, engine) for shape in parameter_shapes(config).values())


def weight_bytes_read(config: AnyModelConfig, engine: EngineConfig) -> int:
    """What a decode step reads of them: all but the embedding, of which it takes single rows."""
    table = (
        0 if is_tied(config) else _parameter_bytes((config.vocab_size, config.hidden_size), engine)
    )
    return weight_bytes(config, engine) - table


def is_tied(config: AnyModelConfig) -> bool:
    """Whether the output layer is the embedding."""
    return isinstance(config, CausalConfig) and config.tied


def _parameter_bytes(shape: tuple[int, ...], engine: EngineConfig) -> int:
    dtype = compute_dtype(engine)
    if len(shape) != 2 or not is_native(engine):
        return math.prod(shape) * BYTES[dtype]
    packing = Packing(engine.weight_dtype or dtype, *shape)
    return math.prod(packing.shape) * packing.itemsize


def cache_bytes_per_user(config: AnyModelConfig, seq_length: int, dtype: str) -> int:
    """Keys and values: 2 * layers * seq_length * key/value heads * head_dim numbers."""
    per_token = 2 * config.num_layers * config.num_key_value_heads * config.head_dim
    return per_token * seq_length * BYTES[dtype]


def user_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """What one user's caches take; native kernels fill keys up to whole tiles of positions."""
    dtype, length = compute_dtype(engine), engine.seq_length
    if not is_native(engine):
        return cache_bytes_per_user(config, length, dtype)
    filled_up = math.ceil(length / TILE) * TILE
    return cache_bytes_per_user(config, length + filled_up, dtype) // 2


def zeros_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """The zeros that overwrite used memory, one block of each length; not for native kernels."""
    if is_native(engine):
        return 0
    full, rest = divmod(engine.seq_length, BLOCK_LENGTH)
    positions = BLOCK_LENGTH * (full > 0) + rest
    return cache_bytes_per_user(config, positions, compute_dtype(engine))


def total_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Weights, everybody's caches, and the zeros: what an engine holds from start to end."""
    caches = engine.users * user_bytes(config, engine)
    return weight_bytes(config, engine) + caches + zeros_bytes(config, engine)


def workspace_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Estimate of what is needed beside `total_bytes`: the largest step, and the process itself."""
    native, number = is_native(engine), BYTES[compute_dtype(engine)]
    process = PROCESS_BYTES[engine.device_target]
    return process + workspace.largest_step(config, engine, native, number)


def loading_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Most memory while weights are loaded: all of them, and one that is on its way in.

    All are there from the start, as zeros. The one on its way in is an array in the type that is
    computed in, and a packed one if native kernels want it so.
    """
    largest = max(parameter_shapes(config).values(), key=math.prod)
    array = math.prod(largest) * BYTES[compute_dtype(engine)]
    packed = _parameter_bytes(largest, engine) if is_native(engine) else 0
    process = PROCESS_BYTES[engine.device_target]
    return process + weight_bytes(config, engine) + array + packed


def users_that_fit(config: AnyModelConfig, engine: EngineConfig, available: int) -> int:
    """The most users, up to 1024, whose engine and largest step stay within `available` bytes."""
    fit, too_many = 0, MOST_USERS + 1
    while too_many - fit > 1:
        users = (fit + too_many) // 2
        one = replace(engine, users=users, users_per_cell=None)
        if total_bytes(config, one) + workspace_bytes(config, one) <= available:
            fit = users
        else:
            too_many = users
    return fit
