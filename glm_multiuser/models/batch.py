"""What one step reads and writes: a typed dictionary per kind of batch.

A batch is made once per step, inside the graph, and handed to every cell. `RaggedBatch` has any
tokens of any users in one graph. The padded kinds have a graph for each of their shapes:
`PromptBatch` whole prompts, `ChunkBatch` a chunk of one prompt, `DecodeBatch` one new token of each
user.

They are dictionaries, because a NamedTuple that a graph makes runs Python in every step, and one
that is an argument makes every step compile a graph of its own (measured with MindSpore 2.7.2).

In the shapes, `kv_heads` are the heads of keys and values, `group` the heads of queries that share
one of them, and `positions` those of the cache blocks in use.
"""

from __future__ import annotations

from typing import Optional, TypedDict, Union, final

from mindspore import Parameter, Tensor


@final
class LayerwisePrefill(TypedDict):
    """Prompts that must be prefilled whole, some layers in each step."""

    plan: Tensor
    """int32 [4]: rows; how many of them, from the first on, are in every layer; the others are in
    the layers from the third number up to, not including, the fourth."""
    saved: Parameter
    """[seq_length, hidden_size]: where the others wait between two steps. Of a causal model, whose
    rows are all in every layer, [1, hidden_size]."""


@final
class RaggedBatch(TypedDict):
    """Any tokens of any users; all arrays have the graph's fixed row count."""

    users: Tensor
    """int32 [rows]: the slot of each token's user."""
    positions: Tensor
    """int32 [2, rows]: where each token is written, and how many positions it attends to."""
    used: Tensor
    """int32 [1]: how many rows are valid."""
    rotary_positions: Tensor
    """int32 [parts, rows]: each part of a head has positions of its own."""
    cosine: Tensor
    """float32 [table rows, head_dim / parts]: `x[i]` becomes `x[i] * cosine[i] + x[partner[i]] *
    sine[i]`."""
    sine: Tensor
    """float32 [table rows, head_dim / parts], with the sign of the partner."""
    partner: Tensor
    """int32 [head_dim]."""
    layerwise: LayerwisePrefill


@final
class Rotary(TypedDict):
    """The rotary embedding of a padded batch's rows."""

    cosine: Tensor
    """`[rows, 1, head_dim]`."""
    sine: Tensor
    """`[rows, 1, head_dim]`, with the sign of the partner."""
    partners: Tensor
    """`[head_dim, head_dim]`, 0 or 1: `x @ partners` has each number's partner in its place."""


@final
class Home(TypedDict):
    """Where the keys and values of some users are."""

    cell: Union[int, Tensor]
    rows: Tensor
    """int32 [users], rows of that cell."""


@final
class PromptBatch(TypedDict):
    """Whole prompts, padded to t tokens, one after the other."""

    rotary: Rotary
    mask: Tensor
    """0 or `MASKED`, broadcast to `[prompts, kv_heads, group * t, t]`."""
    real: Optional[Tensor]
    """bool [prompts, 1, t, 1]: which tokens are no padding."""
    home: Optional[Home]
    """None: nothing is cached."""


@final
class BlockSource(TypedDict):
    """What one block of positions holds after a chunk was written."""

    token: Tensor
    """int32 [positions of the block]: the token of the chunk that belongs there."""
    kept: Tensor
    """bool [1, 1, positions of the block, 1]: keeps what it has."""
    written: Tensor
    """bool [1, 1, positions of the block, 1]: takes the token. Neither: it becomes zero."""


@final
class ChunkBatch(TypedDict):
    """A chunk of one user's prompt, padded to t tokens."""

    rotary: Rotary
    mask: Tensor
    """0 or `MASKED`, [1, kv_heads, group * t, positions]."""
    sources: tuple[BlockSource, ...]
    """Of each block in use."""
    home: Home


@final
class BlockTarget(TypedDict):
    """Where one block takes the new tokens of a cell's users."""

    index: Tensor
    """int32 [users * kv_heads, 3]: row, head and position of each vector."""
    inside: Tensor
    """bool [users * kv_heads, 1]: whether it belongs into this block."""


@final
class CellStep(TypedDict):
    """One new token of each user of a cell."""

    targets: tuple[BlockTarget, ...]
    """Of each block in use."""
    mask: Tensor
    """0 or `MASKED`, [users, kv_heads, group, positions]."""


@final
class DecodeBatch(TypedDict):
    """One new token of each user; rows after the users' are padding."""

    rotary: Rotary
    cells: tuple[CellStep, ...]
    home: Optional[Home]
    """None: every user in order, cell by cell."""


@final
class ReplacedBlocks(TypedDict):
    """Blocks of one user's row that are overwritten; how used memory becomes new."""

    block: int
    """The first of them."""


PaddedBatch = Union[PromptBatch, ChunkBatch, DecodeBatch]
Batch = Union[RaggedBatch, PaddedBatch]
CacheAccess = Union[ReplacedBlocks, ChunkBatch, CellStep]
"""What a cell of the padded KV cache is called with."""
