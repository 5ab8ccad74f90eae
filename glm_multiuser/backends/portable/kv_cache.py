"""The keys and values of every user, as Parameters inside the compiled graph.

Each attention holds `kv_past = nn.CellList([KVCache(...), ...])`; `CellLayout` maps users to cells
and rows. Positions are divided into blocks, each with its own pair of Parameters, because reading
part of a Parameter would copy it: a graph that needs two blocks reads exactly two.

Invariant: positions after a user's last one are zero. A prompt *replaces* whole blocks of its
user's row, and a decode step *adds* its key and value to a position that is still zero, which works
in place. A chunk of a prompt *extends* the row: it replaces its blocks by their contents before the
chunk, the chunk, and zeros, which also truncates a row that was longer. Because blocks are replaced
rather than multiplied by zero, a row that held NaN can safely be reused.
"""

from __future__ import annotations

from typing import Any, Optional

from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.backends.portable.types import zeros
from glm_multiuser.models.batch import BlockSource, BlockTarget, CacheAccess, CellStep, ChunkBatch


class KVBlock(nn.Cell):
    """Keys and values of one cell's users for one block of positions.

    Both Parameters have the shape `[users, heads, positions, head_dim]`.
    """

    def __init__(self, users: int, heads: int, positions: int, head_dim: int, dtype: str) -> None:
        super().__init__()
        shape = (users, heads, positions, head_dim)
        keys, values = zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype)
        self.key_past = Parameter(keys, name="key_past", requires_grad=False)
        self.value_past = Parameter(values, name="value_past", requires_grad=False)
        self.scatter_update = ops.ScatterUpdate()
        self.scatter_nd_add = ops.ScatterNdAdd()
        self.gather = ops.Gather()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def replace(self, rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrites `rows` int32 [n] with `key` and `value` [n, heads, positions, head_dim]."""
        return (
            self.scatter_update(self.key_past, rows, key),
            self.scatter_update(self.value_past, rows, value),
        )

    def append(self, target: BlockTarget, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds `key` and `value` [n, head_dim] to positions that are still zero.

        A vector that does not belong to this block adds exact zeros, whatever it contains.
        """
        nothing = ops.zeros_like(key)
        index, inside = target["index"], target["inside"]
        return (
            self.scatter_nd_add(self.key_past, index, ops.select(inside, key, nothing)),
            self.scatter_nd_add(self.value_past, index, ops.select(inside, value, nothing)),
        )

    def extend(
        self, rows: Tensor, source: BlockSource, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Overwrites the tail of the one row in `rows` with new tokens, followed by zeros.

        Args:
            rows: int32 [1].
            source: what each position contains afterwards.
            key, value: `[1, heads, t, head_dim]`.

        Returns:
            The row's new keys and values, and the writes to wait for.
        """
        past_key, past_value = self.keys_and_values(rows)
        key, value = self.gather(key, source["token"], 2), self.gather(value, source["token"], 2)
        nothing = ops.zeros_like(key)
        key = ops.select(source["kept"], past_key, ops.select(source["written"], key, nothing))
        value = ops.select(
            source["kept"], past_value, ops.select(source["written"], value, nothing)
        )
        return key, value, self.replace(rows, key, value)

    def keys_and_values(self, rows: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """The Parameters themselves if `rows` is None, otherwise copies of these rows."""
        if rows is None:
            return self.key_past, self.value_past
        return self.gather(self.key_past, rows, 0), self.gather(self.value_past, rows, 0)


class KVCache(nn.Cell):
    """The keys and values of one or more users: a `KVBlock` per block of positions.

    A cell that is selected by a Tensor can only be *called*, so `construct` serves all uses of the
    cache.

    Args:
        softmax: of the scores.
    """

    def __init__(
        self,
        users: int,
        heads: int,
        head_dim: int,
        block_lengths: tuple[int, ...],
        softmax: nn.Cell,
        dtype: str,
    ) -> None:
        super().__init__()
        blocks = [KVBlock(users, heads, length, head_dim, dtype) for length in block_lengths]
        self.blocks = nn.CellList(blocks)
        self.softmax = softmax

    def construct(
        self, query: Tensor, key: Any, value: Any, rows: Optional[Tensor], access: CacheAccess
    ) -> Tensor:
        """Writes new keys and values, and attends to all cached positions.

        `heads` are key/value heads; the `group` queries that share one of them are adjacent.

        Args:
            query: for new tokens `[n, heads, group, head_dim]`; for a chunk of t tokens `[1, heads,
                group * t, head_dim]`; when replacing blocks, any tensor, which is returned.
            key: for new tokens `[n * heads, head_dim]`; for a chunk `[1, heads, t, head_dim]`; when
                replacing blocks, one `[n, heads, positions, head_dim]` for each.
            value: like `key`.
            rows: int32 [n], the users' rows in this cell; None: all of them in order.
            access: selects one of these three, with its indices.

        Returns:
            The context of each query, in the shape of `query`.
        """
        if "block" in access:
            result = self.replace(query, key, value, rows, access["block"])
        elif "sources" in access:
            result = self.extend(query, key, value, rows, access)
        else:
            result = self.append(query, key, value, rows, access)
        return result

    def replace(
        self,
        query: Tensor,
        key: tuple[Tensor, ...],
        value: tuple[Tensor, ...],
        rows: Optional[Tensor],
        first: int,
    ) -> Tensor:
        done: tuple[Any, ...] = ()
        for number in range(len(key)):
            block = self.blocks[first + number]
            done = (*done, block.replace(rows, key[number], value[number]))
        return ops.depend(query, done)

    def append(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Optional[Tensor], step: CellStep
    ) -> Tensor:
        targets = step["targets"]
        done: tuple[Any, ...] = ()
        for number in range(len(targets)):
            done = (*done, self.blocks[number].append(targets[number], key, value))
        # Reads depend on the writes through their indices, not through the Parameter: that would
        # redirect the write to a copy.
        query = ops.depend(query, done)
        if rows is not None:
            rows = ops.depend(rows, done)
        scores: tuple[Tensor, ...] = ()
        past_values: tuple[Tensor, ...] = ()
        for number in range(len(targets)):
            past_key, past_value = self.blocks[number].keys_and_values(rows)
            scores = (*scores, self.blocks[number].scores(query, past_key))
            past_values = (*past_values, past_value)
        return self.weigh(scores, past_values, step["mask"])

    def extend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Any, chunk: ChunkBatch
    ) -> Tensor:
        sources = chunk["sources"]
        # Otherwise the keys of all layers are copied before the first layer runs.
        rows = ops.depend(rows, query)
        done: tuple[Any, ...] = ()
        scores: tuple[Tensor, ...] = ()
        past_values: tuple[Tensor, ...] = ()
        for number in range(len(sources)):
            past_key, past_value, written = self.blocks[number].extend(
                rows, sources[number], key, value
            )
            done = (*done, written)
            scores = (*scores, self.blocks[number].scores(query, past_key))
            past_values = (*past_values, past_value)
        return ops.depend(self.weigh(scores, past_values, chunk["mask"]), done)

    def weigh(
        self, scores: tuple[Tensor, ...], past_values: tuple[Tensor, ...], mask: Tensor
    ) -> Tensor:
        """One softmax over all blocks, and the weighted sum of their values."""
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
