"""Plans an engine's memory from its model's shape, before anything is loaded.

Weights, caches and zeros are exact. The workspace of a step is estimated from the shapes of its
largest tensors. For native kernels on CPUs the sum was compared with measured memory
(`benchmarks/plan_memory.py`). For MindSpore's operators (`engine/graph_memory.py`) it assumes that
memory is reused as soon as it is free, as on the Ascend card that MindSpore simulates
(`benchmarks/ascend_memory.py`). It was not measured on a real card; on a CPU MindSpore takes far
more, as if it kept the outputs of all operators of all graphs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Optional

from glm_multiuser.backend_choice import (
    cache_dtype_of,
    dtype_of,
    is_native,
    portable_reason,
    weight_types_of,
)
from glm_multiuser.backends.native import pages
from glm_multiuser.backends.native.group_packing import packing_of
from glm_multiuser.backends.native.kv_layout import held_bytes, scale_bytes
from glm_multiuser.backends.native.packing import BLOCK_BYTES
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.config import MOST_USERS, EngineConfig
from glm_multiuser.device import (
    PREFILL_CHUNK_NATIVE,
    PROCESS_BYTES,
    PROMPT_LOGITS,
    cores,
)
from glm_multiuser.engine import graph_memory
from glm_multiuser.engine.graph_shapes import layout_of
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.sizes import most_within

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
FLOAT32 = BYTES["float32"]

SHORTEST = 2
"""Minimum tokens of a request: one of the prompt, one of the answer."""


def weight_count(config: AnyModelConfig) -> int:
    """Number of weights (parameters) of a model; a tied output layer adds none."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def weight_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes of all weights in memory: for native kernels packed, with vectors in float32."""
    shapes = parameter_shapes(config)
    return sum(_parameter_bytes(name, shape, engine) for name, shape in shapes.items())


def weight_bytes_read(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it reads rows."""
    table = (config.vocab_size, config.hidden_size)
    embedding = next(name for name, shape in parameter_shapes(config).items() if shape == table)
    unread = 0 if config.tied else _parameter_bytes(embedding, table, engine)
    return weight_bytes(config, engine) - unread


def _parameter_bytes(name: str, shape: tuple[int, ...], engine: EngineConfig) -> int:
    dtype = dtype_of(engine)
    if len(shape) != 2 or not is_native(engine):
        return math.prod(shape) * BYTES[dtype]
    kept_as = weight_types_of(engine).get(name, engine.weight_dtype or dtype)
    packing = packing_of(kept_as, *shape)
    return math.prod(packing.shape) * packing.array_dtype.itemsize


def cache_bytes_per_user(config: AnyModelConfig, seq_length: int, dtype: str) -> int:
    """Bytes of 2 * layers * seq_length * key/value heads * head_dim keys and values, of a type in
    `BYTES`, and with int8 of their scales."""
    per_head = config.head_dim * BYTES[dtype] + scale_bytes(dtype)
    return 2 * config.num_layers * seq_length * config.num_key_value_heads * per_head


def user_bytes(config: AnyModelConfig, engine: EngineConfig, tokens: Optional[int] = None) -> int:
    """Bytes of one user's caches with `tokens` tokens; default: `seq_length`.

    With native kernels, each head takes whole key tiles and whole pages, and only for `tokens` if
    pages can be released. Otherwise, and if they are preallocated, caches always have room for
    `seq_length`.
    """
    dtype, length = cache_dtype_of(engine), engine.seq_length
    if not is_native(engine):
        return cache_bytes_per_user(config, length, dtype)
    held = length if tokens is None else tokens
    return held_bytes(config, dtype, held, length, engine.preallocate_caches)


def tokens_in(config: AnyModelConfig, engine: EngineConfig, limit: int) -> int:
    """Maximum tokens of one user, up to `seq_length`, whose caches fit in `limit` bytes."""
    if user_bytes(config, engine, tokens=0) > limit:
        return 0
    return most_within(limit, partial(user_bytes, config, engine), engine.seq_length)


def check_cache_memory(config: AnyModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError if `cache_memory` cannot be enforced, or is too small for any request."""
    if engine.cache_limit is None:
        return
    reason = portable_reason(engine) or pages.UNAVAILABLE
    if reason:
        raise ConfigError(
            f"cache_memory {engine.cache_memory!r} needs native kernels, but {reason}; other "
            "caches take their whole size from the start, which users and seq_length decide"
        )
    if engine.preallocate_caches:
        raise ConfigError(
            f"cache_memory is {engine.cache_memory!r}, and preallocate_caches is True; such caches "
            "take their whole size from the start, which users and seq_length decide"
        )
    least = user_bytes(config, engine, tokens=SHORTEST)
    if least > engine.cache_limit:
        raise ConfigError(
            f"cache_memory is {engine.cache_memory!r}; it must be at least {least} bytes, which "
            f"{SHORTEST} tokens of one user take"
        )


def cache_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Maximum bytes of all users' caches."""
    caches = engine.users * user_bytes(config, engine)
    return caches if engine.cache_limit is None else min(caches, engine.cache_limit)


def zeros_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes of zeros that overwrite used caches, one block per length; none for native kernels."""
    if is_native(engine):
        return 0
    positions = sum({*layout_of(engine).block_lengths})
    return cache_bytes_per_user(config, positions, dtype_of(engine))


def total_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes that an engine holds permanently: weights, all caches, and zeros."""
    caches = cache_bytes(config, engine)
    return weight_bytes(config, engine) + caches + zeros_bytes(config, engine)


def workspace_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Estimated bytes besides `total_bytes`: of the largest step, and of the process itself."""
    process = PROCESS_BYTES[engine.device_target]
    if not is_native(engine):
        return process + constant_bytes(config, engine) + step_bytes(config, engine)
    prompts = engine.seq_length
    if config.is_causal:
        longest = engine.users * engine.seq_length
        prompts = min(engine.prefill_chunk or PREFILL_CHUNK_NATIVE, longest)
    layer = (engine.users + prompts) * widest(config)
    logits = (engine.users + PROMPT_LOGITS * config.is_causal) * config.vocab_size
    held = 0 if config.is_causal else engine.seq_length * config.hidden_size
    return process + FLOAT32 * (layer + held + logits)


def widest(config: AnyModelConfig) -> int:
    """Activations per row in an MLP: residual, input, and inner activations."""
    inner = 3 if config.is_causal else 1
    return 2 * config.hidden_size + inner * config.inner_hidden_size


def step_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes of the largest graph of MindSpore's operators while it runs."""
    return graph_memory.step_bytes(config, engine, BYTES[dtype_of(engine)])


def constant_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Bytes that all graphs of MindSpore's operators hold once they are compiled."""
    return graph_memory.constant_bytes(config, engine, BYTES[dtype_of(engine)])


def loading_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Peak bytes while weights are loaded: all weights, and those in transit.

    With native kernels these are two blocks per core, as read and converted. Otherwise, weights are
    loaded one parameter at a time.
    """
    if is_native(engine):
        underway = cores() * 2 * BLOCK_BYTES
    else:
        largest = max(parameter_shapes(config).values(), key=math.prod)
        underway = math.prod(largest) * BYTES[dtype_of(engine)]
    return PROCESS_BYTES[engine.device_target] + weight_bytes(config, engine) + underway


def users_that_fit(config: AnyModelConfig, engine: EngineConfig, available: int) -> int:
    """Maximum users, up to 1024, whose engine and largest step fit in `available` bytes."""

    def needed(users: int) -> int:
        one = replace(engine, users=users, users_per_cell=None)
        return total_bytes(config, one) + workspace_bytes(config, one)

    return most_within(available, needed, MOST_USERS)
