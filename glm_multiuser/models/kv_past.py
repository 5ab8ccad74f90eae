"""The keys and values of every user, as Parameters inside the compiled graph.

Each layer holds `kv_past = nn.CellList([KVPast(...), ...])`. One `KVPast` cell is the home of one
or more users; `CellLayout` says which user lives in which row of which cell. Positions are kept in
blocks, each its own pair of Parameters, because reading part of a Parameter would copy it: a graph
that needs two blocks reads exactly two.

Invariant: what lies behind a user's last position is zero. A prompt *replaces* whole blocks of its
user's row, and a decode step *adds* its key and value to a position that is still zero, which is
the form that works in place. A chunk of a prompt *extends* the row: it replaces its blocks by what
they held before the chunk, the chunk, and zeros, so a row that held more before is cut at the same
time. Replacing, not multiplying, is also what makes a row that once held NaN safe to hand on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.config import BLOCK_LENGTH
from glm_multiuser.models.attention import ScaledSoftmax
from glm_multiuser.models.layers import zeros


@dataclass(frozen=True)
class CellLayout:
    """Which user lives in which row of which cell, and how its positions are cut into blocks.

    Attributes:
        users: users in all cells together.
        users_per_cell: rows of one cell; the last cell may have fewer.
        block_lengths: positions per block, in order.
    """

    users: int
    users_per_cell: int
    block_lengths: tuple[int, ...]

    @classmethod
    def plan(
        cls,
        users: int,
        seq_length: int,
        block_length: int = BLOCK_LENGTH,
        users_per_cell: Optional[int] = None,
    ) -> CellLayout:
        """Cuts `seq_length` positions into blocks; without `users_per_cell`, one cell holds all."""
        full, rest = divmod(seq_length, block_length)
        blocks = (block_length,) * full + (rest,) * (rest > 0)
        return cls(users, users_per_cell or users, blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Users of each cell."""
        full, rest = divmod(self.users, self.users_per_cell)
        return (self.users_per_cell,) * full + (rest,) * (rest > 0)

    @property
    def seq_length(self) -> int:
        """Positions that each user has."""
        return sum(self.block_lengths)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold the first `positions` positions."""
        return math.ceil(positions / self.block_lengths[0])


NO_USERS = CellLayout(users=0, users_per_cell=1, block_lengths=())
"""Nothing is cached: for training and scoring."""


class KVBlock(nn.Cell):
    """Keys and values of one cell's users for one block of positions.

    Both Parameters have the shape `[users, heads, positions, head_dim]`.
    """

    def __init__(
        self, users: int, heads: int, positions: int, head_dim: int, dtype: ms.dtype.Type
    ) -> None:
        super().__init__()
        shape = (users, heads, positions, head_dim)
        self.key_past = Parameter(zeros(*shape, dtype=dtype), name="key_past", requires_grad=False)
        self.value_past = Parameter(
            zeros(*shape, dtype=dtype), name="value_past", requires_grad=False
        )
        self.scatter_update = ops.ScatterUpdate()
        self.scatter_nd_add = ops.ScatterNdAdd()
        self.gather = ops.Gather()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def replace(self, rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrites `rows` [n] int32 by `key` and `value` [n, heads, positions, head_dim]."""
        return (
            self.scatter_update(self.key_past, rows, key),
            self.scatter_update(self.value_past, rows, value),
        )

    def append(
        self, index: Tensor, inside: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds to positions that are still zero.

        Args:
            index: int32 [n, 3], the (row, head, position) of each vector.
            inside: bool [n, 1]; a vector that does not belong into this block adds exact zeros,
                whatever it holds.
            key: `[n, head_dim]`.
            value: `[n, head_dim]`.
        """
        nothing = ops.zeros_like(key)
        return (
            self.scatter_nd_add(self.key_past, index, ops.select(inside, key, nothing)),
            self.scatter_nd_add(self.value_past, index, ops.select(inside, value, nothing)),
        )

    def extend(
        self, rows: Tensor, piece: tuple[Tensor, Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Overwrites the one row in `rows` [1] from somewhere on: by new tokens, then by zeros.

        Args:
            rows: int32 [1].
            piece: for each position of this block: which of the new tokens belongs there, int32
                [positions]; whether it keeps what it has, and whether a new token belongs there,
                bool `[1, 1, positions, 1]`.
            key: `[1, heads, t, head_dim]`.
            value: `[1, heads, t, head_dim]`.

        Returns:
            The row's keys and values as they are now, and what to wait for.
        """
        past_key, past_value = self.keys_and_values(rows)
        index, kept, fresh = piece
        key, value = self.gather(key, index, 2), self.gather(value, index, 2)
        nothing = ops.zeros_like(key)
        key = ops.select(kept, past_key, ops.select(fresh, key, nothing))
        value = ops.select(kept, past_value, ops.select(fresh, value, nothing))
        return key, value, self.replace(rows, key, value)

    def keys_and_values(self, rows: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """The Parameters themselves for `rows` None, copies of the named rows otherwise."""
        if rows is None:
            return self.key_past, self.value_past
        return self.gather(self.key_past, rows, 0), self.gather(self.value_past, rows, 0)


class KVPast(nn.Cell):
    """The home of some users' keys and values in one layer: a `KVBlock` per block of positions.

    A cell that is chosen by a Tensor can only be *called*, so all ways of using the cache are
    this cell's `construct`.
    """

    def __init__(
        self,
        users: int,
        heads: int,
        head_dim: int,
        block_lengths: tuple[int, ...],
        softmax: ScaledSoftmax,
        dtype: ms.dtype.Type,
    ) -> None:
        super().__init__()
        self.blocks = nn.CellList(
            [KVBlock(users, heads, length, head_dim, dtype) for length in block_lengths]
        )
        self.softmax = softmax

    def construct(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        rows: Optional[Tensor],
        step: tuple[Any, ...],
        first_block: int = 0,
    ) -> Tensor:
        """Takes in whole prompts (`step` is empty), a chunk of one, or one new token of each row.

        `heads` are those of keys and values; `queries` that share one of them stand one behind
        the other, those of one head first.

        Args:
            query: `[n, heads, queries, head_dim]` of new tokens; of a chunk of t tokens `[1,
                heads, queries * t, head_dim]`; for whole prompts anything to return.
            key: `[n * heads, head_dim]` of new tokens; `[1, heads, t, head_dim]` of a chunk; for
                whole prompts one `[n, heads, positions, head_dim]` per block that they reach.
            value: like `key`.
            rows: int32 [n], the users' rows in this cell; None: all of them in order.
            step: what `decode_step` or `chunk_step` of `MultiUserModel` made for this cell.
            first_block: of whole prompts: the first block to replace.

        Returns:
            What each query attended to, in the shape of `query`.
        """
        if len(step) == 0:
            return self.replace(query, key, value, rows, first_block)
        if step[0] == "chunk":
            return self.extend(query, key, value, rows, step)
        return self.attend(query, key, value, rows, step)

    def replace(
        self,
        query: Tensor,
        key: tuple[Tensor, ...],
        value: tuple[Tensor, ...],
        rows: Optional[Tensor],
        first_block: int,
    ) -> Tensor:
        done: tuple[Any, ...] = ()
        for number in range(len(key)):
            done = (
                *done,
                self.blocks[first_block + number].replace(rows, key[number], value[number]),
            )
        return ops.depend(query, done)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Optional[Tensor],
        step: tuple[Any, ...],
    ) -> Tensor:
        _, writes, mask = step
        done: tuple[Any, ...] = ()
        for number in range(len(writes)):
            index, inside = writes[number]
            done = (*done, self.blocks[number].append(index, inside, key, value))
        # Reads wait for the writes through what indexes them, never through the Parameter:
        # that would make the write go to a copy.
        query = ops.depend(query, done)
        if rows is not None:
            rows = ops.depend(rows, done)
        scores: tuple[Tensor, ...] = ()
        past_values: tuple[Tensor, ...] = ()
        for number in range(len(writes)):
            past_key, past_value = self.blocks[number].keys_and_values(rows)
            scores = (*scores, self.blocks[number].scores(query, past_key))
            past_values = (*past_values, past_value)
        return self.weigh(scores, past_values, mask)

    def extend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Any, step: tuple[Any, ...]
    ) -> Tensor:
        _, pieces, mask = step
        done: tuple[Any, ...] = ()
        scores: tuple[Tensor, ...] = ()
        past_values: tuple[Tensor, ...] = ()
        for number in range(len(pieces)):
            past_key, past_value, written = self.blocks[number].extend(
                rows, pieces[number], key, value
            )
            done = (*done, written)
            scores = (*scores, self.blocks[number].scores(query, past_key))
            past_values = (*past_values, past_value)
        return ops.depend(self.weigh(scores, past_values, mask), done)

    def weigh(
        self, scores: tuple[Tensor, ...], past_values: tuple[Tensor, ...], mask: Tensor
    ) -> Tensor:
        """One softmax over all blocks, and the values of each by their weights."""
        weights = self.softmax(join(scores), mask)
        context = self.blocks[0].weigh(part(weights, scores, 0), past_values[0])
        for number in range(1, len(scores)):
            weighted = self.blocks[number].weigh(part(weights, scores, number), past_values[number])
            context = context + weighted
        return context


def join(scores: tuple[Tensor, ...]) -> Tensor:
    # Joining a single block would copy it.
    return scores[0] if len(scores) == 1 else ops.concat(scores, 3)


def part(weights: Tensor, scores: tuple[Tensor, ...], number: int) -> Tensor:
    """The columns of `weights` that belong to block `number`."""
    if len(scores) == 1:
        return weights
    first = scores[0].shape[3] * number
    return weights[:, :, :, first : first + scores[number].shape[3]]
