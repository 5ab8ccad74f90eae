"""What the portable backend's graphs need beside weights and caches, from settings alone.

Each term is a tensor that is there when a graph needs most, as the Ascend card that MindSpore
simulates shows it (`benchmarks/ascend_memory.py`): memory is used again as soon as it is free.
"""

from __future__ import annotations

import math

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.config import AnyModelConfig, EngineConfig, prompt_lengths
from glm_multiuser.device import PREFILL_CHUNK
from glm_multiuser.engine.graph_shapes import (
    MOST_PROMPTS,
    batch_sizes,
    block_counts,
    chunk_lengths,
    prompt_counts,
    table_positions,
)

FLOAT32 = 4


def step_bytes(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Of the graph that needs most; `number`: bytes of a weight, an activation or a key."""
    needs = (prompt_step, decode_step, output_step, replace_step)
    return max(need(config, engine, number) for need in needs)


def prompt_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """A prompt of ChatGLM-6B, which is prefilled whole, or a chunk of another over its whole past.

    Attention holds three times the scores of all heads in float32 (mask, cast, factor; mask, sum,
    softmax), what the layer's input is added to, and keys and values: of a chunk those of all
    positions, old and new. While the MLP runs, the mask stays.
    """
    rows, positions = prompt_rows(config, engine), engine.seq_length
    scores = config.num_attention_heads * rows * positions * FLOAT32
    pasts = 2 if config.is_causal else 1
    pasts *= config.num_key_value_heads * positions * config.head_dim * number
    attention = 3 * scores + pasts + rows * config.hidden_size * number
    return max(attention, scores + mlp(config, rows, number))


def prompt_rows(config: AnyModelConfig, engine: EngineConfig) -> int:
    """Tokens of prompts that one graph takes in at most."""
    if not config.is_causal:
        return engine.seq_length
    return min(engine.prefill_chunk or PREFILL_CHUNK[engine.device_target], engine.seq_length)


def mlp(config: AnyModelConfig, rows: int, number: int) -> int:
    """What the layer's input is added to, and four times the middle: a SwiGLU's joined input and
    its halves, or a GELU's factors."""
    return rows * (config.hidden_size + 4 * config.inner_hidden_size) * number


def decode_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """Scores of one token of every user, as in a prompt, each cell's after the other's.

    A graph for a part of the users holds copies of all their values, and of their keys a block
    at a time before it holds their scores.
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
    """Scores of the vocabulary, also in float32; of a prompt always `MOST_PROMPTS` rows."""
    return max(engine.users, MOST_PROMPTS) * config.vocab_size * (number + FLOAT32)


def replace_step(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """A paused user's keys and values of one block come back: of all layers, and cut in layers."""
    positions = max(layout_of(engine).block_lengths)
    return 2 * config.num_layers * pair_bytes(config, positions, number)


def constant_bytes(config: AnyModelConfig, engine: EngineConfig, number: int) -> int:
    """What graphs hold from when they are compiled, each by itself: the rotary tables, and zeros
    that stand after a prompt's last token or for new tokens that belong to another block."""
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
    """Cosines and sines; those of ChatGLM-6B are for half a head."""
    width = config.head_dim if config.is_causal else config.head_dim // 2
    return 2 * table_positions(config, engine.seq_length) * width * number


def pair_bytes(config: AnyModelConfig, positions: int, number: int) -> int:
    """Keys and values of one layer and one user."""
    return 2 * positions * config.num_key_value_heads * config.head_dim * number


def layout_of(engine: EngineConfig) -> CellLayout:
    return CellLayout.plan(engine.users, engine.seq_length, users_per_cell=engine.users_per_cell)
