"""How much memory a model takes, computed from its shape before anything is loaded."""

from __future__ import annotations

import math

from glm_multiuser.checkpoint.layouts import parameter_shapes
from glm_multiuser.config import BLOCK_LENGTH, AnyModelConfig, EngineConfig

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def weight_count(config: AnyModelConfig) -> int:
    """Numbers in the weights of a model of this shape; a tied output layer has none."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def cache_bytes_per_user(config: AnyModelConfig, seq_length: int, dtype: str) -> int:
    """Keys and values: 2 * layers * seq_length * key/value heads * head_dim numbers."""
    per_token = 2 * config.num_layers * config.num_key_value_heads * config.head_dim
    return per_token * seq_length * BYTES[dtype]


def total_bytes(config: AnyModelConfig, engine: EngineConfig, dtype: str) -> int:
    """Weights, everybody's caches, and the zeros that overwrite used memory.

    What graphs and MindSpore itself need comes on top of it.
    """
    zeros = cache_bytes_per_user(config, min(engine.seq_length, 2 * BLOCK_LENGTH), dtype)
    caches = engine.users * cache_bytes_per_user(config, engine.seq_length, dtype)
    return weight_count(config) * BYTES[engine.weight_dtype or dtype] + caches + zeros
