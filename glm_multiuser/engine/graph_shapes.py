"""The graphs that the portable backend needs, from settings alone; does not import MindSpore."""

from __future__ import annotations

import itertools
import math

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.config import EngineConfig
from glm_multiuser.device import PREFILL_CHUNK
from glm_multiuser.model_config import AnyModelConfig

SMALLEST_BATCH = 4

SMALLEST_PROMPT = 16
"""Shorter prompts are padded to this length."""

MOST_PROMPTS = 4
"""Maximum number of prompts per graph call."""

PROMPT_ROWS = 64
"""Short prompts are prefilled together up to this many rows; more would save little."""

TABLE_ROWS = 2048
"""Minimum number of positions in rotary tables, unless the model has fewer."""


def table_positions(config: AnyModelConfig, seq_length: int) -> int:
    """Rows of the rotary tables: position ids of ChatGLM-6B, of which there are two kinds, go up to
    and including the sequence length."""
    return max(min(TABLE_ROWS, config.max_sequence_length), seq_length) + 1


def graph_counts(config: AnyModelConfig, engine: EngineConfig) -> dict[str, int]:
    """Number of graphs of each kind that are compiled before an engine is ready."""
    layout = layout_of(engine)
    reads = len(block_counts(len(layout.block_lengths)))
    if config.is_causal:
        prefill = len(chunk_lengths(engine)) * reads
    else:
        lengths = prompt_lengths(engine.seq_length)
        prefill = sum(len(prompt_counts(layout, length)) for length in lengths)
    return {
        "prefill": prefill,
        "replace a block of the caches": len(layout.block_lengths),
        "decode": len(batch_sizes(layout)) * reads,
    }


def layout_of(engine: EngineConfig) -> CellLayout:
    """The layout of the caches."""
    return CellLayout.plan(engine.users, engine.seq_length, users_per_cell=engine.users_per_cell)


def prompt_lengths(seq_length: int) -> tuple[int, ...]:
    """The lengths that prompts are padded to: powers of two, and `seq_length`."""
    powers = (SMALLEST_PROMPT << power for power in itertools.count())
    return (*itertools.takewhile(lambda length: length < seq_length, powers), seq_length)


def chunk_lengths(engine: EngineConfig) -> tuple[int, ...]:
    """The lengths that chunks of a causal model's prompt are padded to."""
    chunk = engine.prefill_chunk or PREFILL_CHUNK[engine.device_target]
    return prompt_lengths(min(chunk, engine.seq_length))


def block_counts(blocks: int) -> tuple[int, ...]:
    """Numbers of cache blocks that decode graphs read: powers of two, and all."""
    return (*(2**power for power in range(math.ceil(math.log2(blocks)))), blocks)


def batch_sizes(layout: CellLayout) -> tuple[int, ...]:
    """Batch sizes of the decode graphs: at most three, for any number of users.

    A graph for fewer than all users copies their rows out of the caches, which pays off for up to
    about a third of them, and only if one cell holds all users.
    """
    users = layout.users
    if len(layout.sizes) > 1:
        return (users,)
    quarter = users // 4
    return tuple(sorted({size for size in (min(SMALLEST_BATCH, quarter), quarter, users) if size}))


def prompt_counts(layout: CellLayout, length: int) -> tuple[int, ...]:
    """Numbers of prompts of one length per prefill graph: one, and a larger batch if it pays off.

    The latter is a power of two, at most `MOST_PROMPTS`, and requires one cell for all users.
    """
    if len(layout.sizes) > 1:
        return (1,)
    most = min(PROMPT_ROWS // length, layout.users, MOST_PROMPTS)
    return (1, 1 << most.bit_length() - 1) if most > 1 else (1,)
