"""How much memory a model takes, computed from its shape before anything is loaded."""

from __future__ import annotations

from glm_multiuser.config import BLOCK_LENGTH, EngineConfig, ModelConfig

BYTES = {"float32": 4, "float16": 2}


def weight_count(config: ModelConfig) -> int:
    """Numbers in the weights of a ChatGLM-6B model of this shape.

    Embedding and output layer [vocab_size, hidden_size] each; per layer `query_key_value`
    [3 hidden, hidden], `dense` [hidden, hidden], `dense_h_to_4h` [inner, hidden] and
    `dense_4h_to_h` [hidden, inner] with their biases, and two norms; one norm at the end
    (THUDM/chatglm-6b, modeling_chatglm.py).
    """
    hidden, inner = config.hidden_size, config.inner_hidden_size
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * inner + inner + hidden
    norms = 4 * hidden
    layers = config.num_layers * (attention + mlp + norms)
    return 2 * config.vocab_size * hidden + layers + 2 * hidden


def cache_bytes_per_user(config: ModelConfig, seq_length: int, dtype: str) -> int:
    """Keys and values of all layers: 2 * layers * seq_length * hidden_size numbers."""
    return 2 * config.num_layers * seq_length * config.hidden_size * BYTES[dtype]


def total_bytes(config: ModelConfig, engine: EngineConfig, dtype: str) -> int:
    """Weights, everybody's caches, and the zeros that overwrite used memory.

    What graphs and MindSpore itself need comes on top of it.
    """
    zeros = cache_bytes_per_user(config, min(engine.seq_length, 2 * BLOCK_LENGTH), dtype)
    caches = engine.users * cache_bytes_per_user(config, engine.seq_length, dtype)
    return weight_count(config) * BYTES[dtype] + caches + zeros
