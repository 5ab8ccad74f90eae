"""Batches: a typed dictionary for each kind of step.

A batch is built once per step, inside the graph, and passed to every cell. `RaggedBatch` has any
tokens of any users, in one graph. The padded kinds need a graph for each of their shapes:
`PromptBatch` has whole prompts, `ChunkBatch` a chunk of one prompt, `DecodeBatch` one new token of
each user.

They are dictionaries, because a NamedTuple that is created in a graph runs Python in every step,
and one that is an argument compiles a new graph in every step (measured with MindSpore 2.7.2).

In shapes, `kv_heads` are key/value heads, `group` is the number of query heads per key/value head,
and `positions` are those of the cache blocks in use.
"""

from __future__ import annotations

from typing import Optional, TypedDict, Union, final

from mindspore import Parameter, Tensor


@final
class LayerwisePrefill(TypedDict):
    """Prompts that cannot be chunked, and go through some of the layers in each step."""

    plan: Tensor
    """int32 [4]: number of rows; how many of them, from the first on, go through all layers; the
    others go through layers `plan[2]` to `plan[3] - 1`."""
    saved: Parameter
    """[seq_length, hidden_size]: hidden states of the other rows between steps. For causal models,
    which have none, [1, hidden_size]."""


@final
class RaggedBatch(TypedDict):
    """Any tokens of any users; all arrays have the graph's fixed row count."""

    users: Tensor
    """int32 [rows]: the slot of each token's user."""
    positions: Tensor
    """int32 [2, rows]: the position of each token, and how many positions it attends to."""
    used: Tensor
    """int32 [1]: how many rows are valid."""
    rotary_positions: Tensor
    """int32 [parts, rows]: each part of a head has its own positions."""
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
    """`[head_dim, head_dim]`, a permutation matrix: `x @ partners` has the partner of each element
    of x."""


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
    """bool [prompts, 1, t, 1]: which tokens are not padding."""
    home: Optional[Home]
    """None: nothing is cached."""


@final
class BlockSource(TypedDict):
    """What one block of positions contains after a chunk is written."""

    token: Tensor
    """int32 [positions of the block]: index of the token in the chunk."""
    kept: Tensor
    """bool [1, 1, positions of the block, 1]: the position keeps its contents."""
    written: Tensor
    """bool [1, 1, positions of the block, 1]: the token is written. Otherwise the position becomes
    zero, unless kept."""


@final
class ChunkBatch(TypedDict):
    """A chunk of one user's prompt, padded to t tokens."""

    rotary: Rotary
    mask: Tensor
    """0 or `MASKED`, [1, kv_heads, group * t, positions]."""
    sources: tuple[BlockSource, ...]
    """One for each block in use."""
    home: Home


@final
class BlockTarget(TypedDict):
    """Where the new tokens of a cell's users are written in one block."""

    index: Tensor
    """int32 [users * kv_heads, 3]: row, head and position of each vector."""
    inside: Tensor
    """bool [users * kv_heads, 1]: whether it belongs to this block."""


@final
class CellStep(TypedDict):
    """One new token of each user of a cell."""

    targets: tuple[BlockTarget, ...]
    """One for each block in use."""
    mask: Tensor
    """0 or `MASKED`, [users, kv_heads, group, positions]."""


@final
class DecodeBatch(TypedDict):
    """One new token of each user; rows after the users' are padding."""

    rotary: Rotary
    cells: tuple[CellStep, ...]
    home: Optional[Home]
    """None: all users in order, cell by cell."""


@final
class ReplacedBlocks(TypedDict):
    """Blocks of one user's row that are overwritten, for example to clear them."""

    block: int
    """The first of them."""


PaddedBatch = Union[PromptBatch, ChunkBatch, DecodeBatch]
Batch = Union[RaggedBatch, PaddedBatch]
CacheAccess = Union[ReplacedBlocks, ChunkBatch, CellStep]
"""The last argument of a cell of a padded KV cache."""
