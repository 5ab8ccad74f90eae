"""Estimates the memory of the portable backend's graphs, besides weights and caches, from settings.

Each term is a tensor that is live at a graph's peak, as observed with MindSpore's simulated Ascend
card (`benchmarks/ascend_memory.py`): memory is reused as soon as it is free.
"""

from __future__ import annotations

import math

from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.graph_shapes import (
    MOST_PROMPTS,
    batch_sizes,
    block_counts,
    chunk_lengths,
    layout_of,
    prompt_counts,
    prompt_lengths,
    table_positions,
)
from glm_multiuser.model_config import AnyModelConfig

FLOAT32 = 4


def step_bytes(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Peak of the graph that needs most; `number`: bytes of a weight, an activation or a key."""
    needs = (prompt_step, decode_step, output_step, replace_step)
    return max(need(config, engine, number) for need in needs)


def prompt_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """A whole prompt of ChatGLM-6B, or a chunk of another model's prompt with a full past.

    Attention holds three times the scores of all heads in float32 (mask, cast, factor; mask, sum,
    softmax), the residual, and keys and values; for a chunk, those of all positions, old and new.
    The mask stays live during the MLP.
    """
    rows, positions = prompt_rows(config, engine), engine.seq_length
    scores = config.num_attention_heads * rows * positions * FLOAT32
    pasts = 2 if config.is_causal else 1
    pasts *= config.num_key_value_heads * positions * config.head_dim * number
    attention = 3 * scores + pasts + rows * config.hidden_size * number
    return max(attention, scores + mlp(config, rows, number))


def prompt_rows(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Maximum of prompt tokens per graph."""
    return chunk_lengths(engine)[-1] if config.is_causal else engine.seq_length


def mlp(config: AnyModelConfig, rows: int, number: int) -> int:
    """The residual, and four times the inner size: the input of a SwiGLU and its two halves, or the
    factors of a GELU."""
    return rows * (config.hidden_size + 4 * config.inner_hidden_size) * number


def decode_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Scores of one token of every user, as in a prompt, cell by cell.

    A graph for some of the users holds copies of all their values, and of one block of their keys
    at a time, before it holds their scores.
    """
    layout = layout_of(engine)
    row = config.num_attention_heads * engine.seq_length * FLOAT32
    most = engine.users * row + 2 * max(layout.sizes) * row
    for users in batch_sizes(layout)[:-1]:
        position = users * config.num_key_value_heads * config.head_dim * number
        keys, values = max(layout.block_lengths) * position, engine.seq_length * position
        most = max(most, values + max(keys + users * row, 3 * users * row))
    return engine.users * config.hidden_size * number + max(
        most, engine.users * row + mlp(config, engine.users, number)
    )


def output_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Logits, also in float32; for prompts always `MOST_PROMPTS` rows."""
    return max(engine.users, MOST_PROMPTS) * config.vocab_size * (number + FLOAT32)


def replace_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """One block of a paused user's keys and values, for all layers, and split by layer."""
    positions = max(layout_of(engine).block_lengths)
    return 2 * config.num_layers * pair_bytes(config, positions, number)


def constant_bytes(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Constants, of which each graph has its own: the rotary tables, and zeros for padding after a
    prompt's last token and for new tokens that belong to another block."""
    layout = layout_of(engine)
    block = max(layout.block_lengths)
    reads = len(block_counts(len(layout.block_lengths)))
    if config.is_causal:
        zeros = [block] * len(chunk_lengths(engine)) * reads
    else:
        zeros = [
            prompts * block * math.ceil(length / block)
            for length in prompt_lengths(engine.seq_length)
            for prompts in prompt_counts(layout, length)
        ]
    zeros += [users for users in batch_sizes(layout) for _ in range(reads)]
    one = pair_bytes(config, 1, number) // 2
    return len(zeros) * table_bytes(config, engine, number) + sum(zeros) * one


def table_bytes(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Cosines and sines; for ChatGLM-6B, of half a head."""
    width = config.head_dim if config.is_causal else config.head_dim // 2
    return 2 * table_positions(config, engine.seq_length) * width * number


def pair_bytes(config: AnyModelConfig, positions: int, number: int) -> int:
    """Keys and values of one layer and one user."""
    return 2 * positions * config.num_key_value_heads * config.head_dim * number
