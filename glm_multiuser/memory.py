"""How much memory an engine takes, computed from its model's shape before anything is loaded.

Weights, caches and zeros are exact. What a step needs beside them is estimated from the shapes of
its largest tensors. On a CPU with native kernels the sum was held against measured memory
(`benchmarks/plan_memory.py`). For MindSpore's own operators (`engine/graph_memory.py`) it is what
must be there at the same time if memory is used again as soon as it is free, as on the Ascend card
that MindSpore simulates (`benchmarks/ascend_memory.py`). It was not measured on a real one; on a
CPU MindSpore takes far more, as if it kept what every operator of every graph puts out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Optional

from glm_multiuser.backends.native import library, pages
from glm_multiuser.backends.native.group_packing import packing_of
from glm_multiuser.backends.native.kv_layout import held_bytes, scale_bytes
from glm_multiuser.backends.native.packing import BLOCK_BYTES
from glm_multiuser.backends.native.weight_types import (
    described,
    types_for_int4,
    types_in_groups,
)
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.config import (
    BLOCK_LENGTH,
    MOST_USERS,
    AnyModelConfig,
    CausalConfig,
    EngineConfig,
    MixedEngineConfig,
)
from glm_multiuser.device import (
    DEFAULT_DTYPE,
    PREFILL_CHUNK_NATIVE,
    PROCESS_BYTES,
    PROMPT_LOGITS,
    cores,
)
from glm_multiuser.engine import graph_memory
from glm_multiuser.errors import ConfigError
from glm_multiuser.sizes import most_within

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
FLOAT32 = BYTES["float32"]

SHORTEST = 2
"""Tokens of a request: one of its prompt, one of its answer."""


def dtype_of(engine: EngineConfig) -> str:
    """What an engine computes in: its own type, or the device's."""
    return engine.dtype or DEFAULT_DTYPE[engine.device_target]


def is_native(engine: EngineConfig) -> bool:
    """Whether native kernels would be used; if it is for a CPU, on this machine."""
    return not portable_reason(engine)


def portable_reason(engine: EngineConfig) -> str:
    """Why MindSpore's operators would be used; "" if native kernels would."""
    return portable_by_choice(engine) or library.unavailable_reason(engine.device_target)


def portable_by_choice(engine: EngineConfig) -> str:
    """Which setting rules native kernels out; "" if none does."""
    if engine.kernels == "portable":
        return "kernels is 'portable'"
    if dtype_of(engine) != "float32":
        return f"they compute in float32, not in {dtype_of(engine)}"
    if engine.kernels == "auto" and os.environ.get(library.SWITCH) == "0":
        return f"{library.SWITCH} is 0"
    return ""


def check_kernels(engine: EngineConfig) -> None:
    """Raises ConfigError if it asks for what only native kernels can do, and cannot have them."""
    reason = portable_reason(engine)
    if reason and engine.kernels == "native":
        raise ConfigError(f"kernels is 'native', but {reason}")
    own = (None, dtype_of(engine))
    possible = {"weight_dtype": own, "compute_dtype": ("float32",), "cache_dtype": own}
    for name, values in possible.items():
        if reason and getattr(engine, name) not in values:
            wanted = f"{name} {getattr(engine, name)!r}"
            raise ConfigError(f"{wanted} needs native kernels, but {reason}")


def with_weight_dtype(
    engine: EngineConfig,
    config: AnyModelConfig,
    stored: str,
    types: Optional[Mapping[str, str]] = None,
) -> EngineConfig:
    """The same, with the type that matrices are kept in where `weight_dtype` leaves it open: the
    one that a checkpoint has them in, `stored` or, by the matrix, `types`; or with MindSpore's
    operators `dtype`. With int4 every matrix gets a type of its own.

    Raises:
        ConfigError: inputs are to be int8, and no matrix is in groups or int8.
    """
    if engine.weight_dtype == "int4":
        shapes, table = parameter_shapes(config), (config.vocab_size, config.hidden_size)
        inputs = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2}
        tables = [name for name in inputs if shapes[name] == table]
        return _mixed(engine, "int4", types_for_int4(types or {}, inputs, tables))
    if engine.weight_dtype is not None:
        return engine
    if not is_native(engine):
        return replace(engine, weight_dtype=dtype_of(engine))
    kept = types_in_groups(types or {})
    if kept:
        return _mixed(engine, stored, kept)
    if engine.compute_dtype == "int8":
        raise ConfigError(
            "compute_dtype is 'int8'; weight_dtype must be 'int8' or 'int4', because the matrices "
            f"of this model are {stored}"
        )
    return replace(engine, weight_dtype=stored)


def _mixed(engine: EngineConfig, dtype: str, types: Mapping[str, str]) -> EngineConfig:
    return MixedEngineConfig(**{**vars(engine), "weight_dtype": dtype, "weight_types": types})


def weight_types_of(engine: EngineConfig) -> Mapping[str, str]:
    """Name of a matrix -> its type, where that is not `weight_dtype`."""
    return engine.weight_types if isinstance(engine, MixedEngineConfig) else {}


def weight_dtype_of(engine: EngineConfig) -> str:
    """Types of the matrices, in words."""
    return described(engine.weight_dtype or dtype_of(engine), weight_types_of(engine))


def cache_dtype_of(engine: EngineConfig) -> str:
    """The type of keys and values: where `cache_dtype` leaves it open, the one that inputs of
    products are rounded to, or with MindSpore's operators `dtype`."""
    if engine.cache_dtype is not None:
        return engine.cache_dtype
    rounds = engine.compute_dtype != "float32" or engine.weight_dtype == "int8"
    return "bfloat16" if rounds and is_native(engine) else dtype_of(engine)


def weight_count(config: AnyModelConfig) -> int:
    """Numbers in the weights of a model of this shape; a tied output layer has none."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def weight_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """All weights as they lie in memory: for native kernels packed, with vectors in float32."""
    shapes = parameter_shapes(config)
    return sum(_parameter_bytes(name, shape, engine) for name, shape in shapes.items())


def weight_bytes_read(config: AnyModelConfig, engine: EngineConfig) -> int:
    """What a decode step reads of them: all but the embedding, of which it takes single rows."""
    table = (config.vocab_size, config.hidden_size)
    embedding = next(name for name, shape in parameter_shapes(config).items() if shape == table)
    unread = 0 if is_tied(config) else _parameter_bytes(embedding, table, engine)
    return weight_bytes(config, engine) - unread


def is_tied(config: AnyModelConfig) -> bool:
    """Whether the output layer is the embedding."""
    return isinstance(config, CausalConfig) and config.tied


def _parameter_bytes(name: str, shape: tuple[int, ...], engine: EngineConfig) -> int:
    dtype = dtype_of(engine)
    if len(shape) != 2 or not is_native(engine):
        return math.prod(shape) * BYTES[dtype]
    kept_as = weight_types_of(engine).get(name, engine.weight_dtype or dtype)
    packing = packing_of(kept_as, *shape)
    return math.prod(packing.shape) * packing.itemsize


def cache_bytes_per_user(config: AnyModelConfig, seq_length: int, dtype: str) -> int:
    """Keys and values: 2 * layers * seq_length * key/value heads * head_dim numbers of a type in
    `BYTES`, and with int8 their scales."""
    per_head = config.head_dim * BYTES[dtype] + scale_bytes(dtype)
    return 2 * config.num_layers * seq_length * config.num_key_value_heads * per_head


def user_bytes(config: AnyModelConfig, engine: EngineConfig, tokens: Optional[int] = None) -> int:
    """What the caches of one user with so many tokens take; default: `seq_length`.

    With native kernels that is whole tiles of keys and whole pages for each head, and no more
    than the tokens need where pages can be given back. Otherwise it is always `seq_length`.
    """
    dtype, length = cache_dtype_of(engine), engine.seq_length
    if not is_native(engine):
        return cache_bytes_per_user(config, length, dtype)
    if tokens is not None and not pages.UNAVAILABLE:
        length = tokens
    heads = config.num_layers * config.num_key_value_heads
    return held_bytes(dtype, heads, length, config.head_dim)


def tokens_in(config: AnyModelConfig, engine: EngineConfig, limit: int) -> int:
    """The most tokens of one user, up to `seq_length`, whose caches stay within `limit` bytes."""
    if user_bytes(config, engine, tokens=0) > limit:
        return 0
    return most_within(limit, partial(user_bytes, config, engine), engine.seq_length)


def check_cache_memory(config: AnyModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError if `cache_memory` cannot be kept to, or holds no request."""
    if engine.cache_limit is None:
        return
    reason = portable_reason(engine) or pages.UNAVAILABLE
    if reason:
        raise ConfigError(
            f"cache_memory {engine.cache_memory!r} needs native kernels, but {reason}; other "
            "caches take their whole size from the start, which users and seq_length decide"
        )
    least = user_bytes(config, engine, tokens=SHORTEST)
    if least > engine.cache_limit:
        raise ConfigError(
            f"cache_memory is {engine.cache_memory!r}; it must be at least {least} bytes, which "
            f"{SHORTEST} tokens of one user take"
        )


def cache_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """The most that the caches of all users take."""
    caches = engine.users * user_bytes(config, engine)
    return caches if engine.cache_limit is None else min(caches, engine.cache_limit)


def zeros_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """The zeros that overwrite used memory, one block of each length; not for native kernels."""
    if is_native(engine):
        return 0
    full, rest = divmod(engine.seq_length, BLOCK_LENGTH)
    positions = BLOCK_LENGTH * (full > 0) + rest
    return cache_bytes_per_user(config, positions, dtype_of(engine))


def total_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Weights, everybody's caches, and the zeros: what an engine holds from start to end."""
    caches = cache_bytes(config, engine)
    return weight_bytes(config, engine) + caches + zeros_bytes(config, engine)


def workspace_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Estimate of what is needed beside `total_bytes`: the largest step, and the process itself."""
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
    """Numbers per row in the middle of an MLP: what is added again, its input, and inside."""
    inner = 3 if config.is_causal else 1
    return 2 * config.hidden_size + inner * config.inner_hidden_size


def step_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """What the graph of MindSpore's operators that needs most takes while it runs."""
    return graph_memory.step_bytes(config, engine, BYTES[dtype_of(engine)])


def constant_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """What graphs of MindSpore's operators hold from when they are compiled, all together."""
    return graph_memory.constant_bytes(config, engine, BYTES[dtype_of(engine)])


def loading_bytes(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Most memory while weights are loaded: all of them, and what is on its way in.

    With native kernels that is two blocks of each core, as it is read and in another type. Other
    weights are on their way one parameter at a time.
    """
    if is_native(engine):
        underway = cores() * 2 * BLOCK_BYTES
    else:
        largest = max(parameter_shapes(config).values(), key=math.prod)
        underway = math.prod(largest) * BYTES[dtype_of(engine)]
    return PROCESS_BYTES[engine.device_target] + weight_bytes(config, engine) + underway


def users_that_fit(config: AnyModelConfig, engine: EngineConfig, available: int) -> int:
    """The most users, up to 1024, whose engine and largest step stay within `available` bytes."""

    def needed(users: int) -> int:
        one = replace(engine, users=users, users_per_cell=None)
        return total_bytes(config, one) + workspace_bytes(config, one)

    return most_within(available, needed, MOST_USERS)
