"""What every model shares: users who live in its layers, and what one step writes and reads there.

A model differs from others in how it makes queries, keys and values of a token, and in what it
does with what they attended to. Everything between, where the users are, is in here.
"""

from __future__ import annotations

from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from glm_multiuser.config import AnyModelConfig
from glm_multiuser.kernels import operators
from glm_multiuser.kernels.packing import Packing
from glm_multiuser.models.attention import MASKED, ScaledSoftmax
from glm_multiuser.models.graphs import User
from glm_multiuser.models.kv_past import CellLayout, KVPast
from glm_multiuser.models.layers import Embedding, Linear, Numerics
from glm_multiuser.models.user_past import AttendOwn, OwnPast

MOST_PROMPTS = 4
"""Prompts that one graph call takes in at most."""


class MultiUserLayer(nn.Cell):
    """A transformer layer that is the home of its users' keys and values.

    Args:
        config: of the model.
        softmax: of this layer.
        numerics: types to compute in, and with which operators.
        rotary: the model's rotary embedding.
        layout: where each user's keys and values live.
        columns: where queries, keys and values begin in what the products of this layer make,
            for native kernels.
    """

    def __init__(
        self,
        config: AnyModelConfig,
        softmax: ScaledSoftmax,
        numerics: Numerics,
        rotary: Any,
        layout: CellLayout,
        columns: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.queries = self.heads // self.kv_heads
        self.numerics = numerics
        self.softmax = softmax
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()
        self.rotary = rotary
        self.native = numerics.native
        if self.native:
            self.attention_of_users = AttendOwn(config, columns)
        self.set_layout(layout)

    def set_layout(self, layout: CellLayout) -> None:
        """Gives every user of `layout` a home of zeros; what was cached before is dropped."""
        self.layout = layout
        if self.native:
            length = layout.seq_length
            self.kv_past = nn.CellList(
                [OwnPast(users, self.kv_heads, length, self.head_dim) for users in layout.sizes]
            )
            return
        self.kv_past = nn.CellList(
            [
                KVPast(
                    users,
                    self.kv_heads,
                    self.head_dim,
                    layout.block_lengths,
                    self.softmax,
                    self.numerics.compute_type,
                )
                for users in layout.sizes
            ]
        )

    def attend_own(
        self, query: Tensor, key: Tensor, value: Tensor, step: tuple[Tensor, ...]
    ) -> Tensor:
        """Attention of any tokens of any users over their own past, by native kernels.

        Args:
            query: `[tokens, *]`, with columns as given to this layer; not rotated, not scaled.
            key: likewise; `value` too. They may be one tensor.
            step: what `AttendOwn` needs.

        Returns:
            `[tokens, hidden_size]`.
        """
        past: tuple[Any, ...] = ()
        for cell in self.kv_past:
            past = (*past, cell.key_past, cell.value_past)
        rotary = (self.rotary.cosine, self.rotary.sine, self.rotary.partner)
        return self.attention_of_users((query, key, value), step, rotary, past)

    def attend_itself(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of whole prompts over themselves.

        Args:
            query: `[prompts, kv_heads, queries * t, head_dim]`, scaled.
            key: `[prompts, kv_heads, t, head_dim]`; `value` likewise.
            mask: 0 or `MASKED`, broadcast to `[prompts, kv_heads, queries * t, t]`.

        Returns:
            `[prompts * t, hidden_size]`.
        """
        weights = self.softmax(self.scores(query, key), mask)
        return self.rows(self.weigh(weights, value), key.shape[2])

    def prompt_query(self, query: Tensor, t: int) -> Tensor:
        """`[n * t, heads, head_dim]` -> `[n, kv_heads, queries * t, head_dim]`."""
        query = query.reshape(-1, t, self.heads, self.head_dim)
        query = ops.transpose(query, (0, 2, 1, 3))
        return query.reshape(-1, self.kv_heads, self.queries * t, self.head_dim)

    def prompt_keys(self, key: Tensor, t: int) -> Tensor:
        """`[n * t, kv_heads, head_dim]` -> `[n, kv_heads, t, head_dim]`; of values too."""
        return ops.transpose(key.reshape(-1, t, self.kv_heads, self.head_dim), (0, 2, 1, 3))

    def rows(self, context: Tensor, t: int) -> Tensor:
        """`[n, kv_heads, queries * t, head_dim]` -> `[n * t, heads * head_dim]`."""
        context = context.reshape(-1, self.heads, t, self.head_dim)
        return ops.transpose(context, (0, 2, 1, 3)).reshape(-1, self.heads * self.head_dim)

    def attend_past(
        self, query: Tensor, key: Tensor, value: Tensor, user: Any, step: Any
    ) -> Tensor:
        """Attention of one new token of each user over its own past.

        Args:
            query: `[rows, heads, head_dim]`, scaled; rows behind the users' are padding.
            key: `[rows, kv_heads, head_dim]`; `value` likewise.
            user: (cell, rows in the cell); None: every user in order.
            step: what `MultiUserModel.decode_step` made.

        Returns:
            `[rows, hidden_size]`, with zeros for padding.
        """
        rows = query.shape[0]
        query = query.reshape(rows, self.kv_heads, self.queries, self.head_dim)
        if user is not None:
            cell, cell_rows = user
            count = cell_rows.shape[0]
            context = self.kv_past[cell](
                rows_between(query, 0, count),
                rows_between(key, 0, count).reshape(-1, self.head_dim),
                rows_between(value, 0, count).reshape(-1, self.head_dim),
                cell_rows,
                step[0],
            )
        else:
            contexts: tuple[Tensor, ...] = ()
            first = 0
            for cell in range(len(self.kv_past)):
                last = first + self.layout.sizes[cell]
                contexts = (
                    *contexts,
                    self.kv_past[cell](
                        rows_between(query, first, last),
                        rows_between(key, first, last).reshape(-1, self.head_dim),
                        rows_between(value, first, last).reshape(-1, self.head_dim),
                        None,
                        step[cell],
                    ),
                )
                first = last
            context = contexts[0] if len(contexts) == 1 else ops.concat(contexts, 0)
        context = context.reshape(context.shape[0], -1)
        missing = rows - context.shape[0]
        if missing > 0:
            context = ops.concat(
                (context, ops.zeros((missing, context.shape[1]), context.dtype)), 0
            )
        return context


def rows_between(x: Tensor, first: int, last: int) -> Tensor:
    # A slice of everything is not free on CPU: it copies, slowly.
    return x if first == 0 and last == x.shape[0] else x[first:last]


class MultiUserModel(nn.Cell):
    """A model whose layers are `MultiUserLayer`s.

    Subclasses say what their layers and linears are, and compute.

    Args:
        config: the shape of the model.
        numerics: types to compute in; default float32.
        layout: where each user's keys and values live.
    """

    def __init__(
        self, config: AnyModelConfig, numerics: Optional[Numerics], layout: CellLayout
    ) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics or Numerics()
        self.layout = layout
        self.softmax_type = self.numerics.softmax_type
        self.kv_heads = config.num_key_value_heads
        self.queries = config.num_attention_heads // config.num_key_value_heads
        self.head_numbers = Tensor(np.arange(self.kv_heads), ms.int32).reshape(1, -1, 1)
        self.first_rows = Tensor(np.arange(MOST_PROMPTS), ms.int32)
        self.argmax = ops.Argmax(axis=-1, output_type=ms.int32)
        self.gather = ops.Gather()
        self.native = self.numerics.native
        if self.native:
            self.best_tokens = operators.next_token()

    def layer_cells(self) -> nn.CellList:
        """Every `MultiUserLayer`, in order."""
        raise NotImplementedError

    def linears(self) -> list[Linear]:
        """One linear layer of each shape."""
        raise NotImplementedError

    def tokens_of_users(self, input_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """With native kernels: any tokens of any users -> what the last norm makes of them.

        Args:
            input_ids: int32 [tokens].
            step: what `AttendOwn` needs.

        Returns:
            `[tokens, hidden_size]`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, used: Any = None) -> Tensor:
        """`[rows, hidden_size]` -> `[rows, vocab_size]`."""
        raise NotImplementedError

    def packings(self) -> dict[str, Packing]:
        """How the weights are packed that are: by the name of their Parameter."""
        packings = {}
        for _, cell in self.cells_and_names():
            if isinstance(cell, (Linear, Embedding)) and cell.packing is not None:
                (weight,) = (one for one in cell.get_parameters(expand=False) if one.ndim > 1)
                packings[weight.name] = cell.packing
        return packings

    def set_layout(self, layout: CellLayout) -> None:
        """Rebuilds every layer's cells; graphs of the old layout must not be used again."""
        self.layout = layout
        for layer in self.layer_cells():
            layer.set_layout(layout)

    def home(self, user: User) -> tuple[Any, Tensor]:
        """-> (cell, rows in the cell) of one user, or of several that share the only cell."""
        per_cell = self.layout.users_per_cell
        if not isinstance(user, Tensor):
            return user // per_cell, Tensor([user % per_cell], ms.int32)
        rows = ops.reshape(ops.cast(user, ms.int32), (-1,))
        if len(self.layout.sizes) == 1:
            return 0, rows
        return ops.reshape(rows // per_cell, ()), rows % per_cell

    def next_tokens(
        self, hidden: Tensor, logits: Tensor, used: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what every model returns for its rows.

        The most likely next token, int32 [n]; 0 where all is finite and NaN where not, [n];
        logits, [n, vocab_size] in the softmax type.
        """
        if self.native:
            tokens, finite = self.best_tokens(hidden, logits, used)
            return tokens, finite, logits
        logits = ops.cast(logits, self.softmax_type)
        tokens = self.argmax(logits)
        best = ops.gather_d(logits, 1, tokens.reshape(-1, 1))
        finite = ops.sum(hidden * 0, 1) + best.reshape(-1) * 0
        return tokens, finite, logits

    def decode_step(self, positions: Tensor, home: Any, used_blocks: int) -> tuple[Any, ...]:
        """What all layers need to write and read the caches, made once per step.

        Args:
            positions: int32 [users], where each new token is written, -1 for nowhere.
            home: of the users, as `home` returns it; None: all of them in order.
            used_blocks: how many cache blocks are read.

        Returns:
            For each cell: "token", (for each used block: (index int32 [n * kv_heads, 3], inside
            bool [n * kv_heads, 1])), mask [n, kv_heads, queries, used positions].
        """
        steps: tuple[Any, ...] = ()
        if home is not None:
            steps = (self.cell_step(positions, home[1], used_blocks),)
        else:
            first = 0
            for size in self.layout.sizes:
                rows = ops.arange(0, size, 1, dtype=ms.int32)
                cell_positions = rows_between(positions, first, first + size)
                steps = (*steps, self.cell_step(cell_positions, rows, used_blocks))
                first = first + size
        return steps

    def cell_step(self, positions: Tensor, rows: Tensor, used_blocks: int) -> tuple[Any, Any, Any]:
        shape = (positions.shape[0], self.kv_heads, 1)
        position = ops.broadcast_to(positions.reshape(-1, 1, 1), shape)
        row = ops.broadcast_to(rows.reshape(-1, 1, 1), shape)
        head = ops.broadcast_to(self.head_numbers, shape)
        writes: tuple[Any, ...] = ()
        first = 0
        for number in range(used_blocks):
            length = self.layout.block_lengths[number]
            offset = position - first
            inside = ops.logical_and(offset >= 0, offset < length)
            offset = ops.select(inside, offset, ops.zeros_like(offset))
            index = ops.concat((row, head, offset), 2).reshape(-1, 3)
            writes = (*writes, (index, inside.reshape(-1, 1)))
            first = first + length
        columns = ops.arange(0, first, 1, dtype=ms.int32).reshape(1, 1, 1, first)
        unseen = columns > positions.reshape(-1, 1, 1, 1)
        mask = ops.cast(unseen, self.softmax_type) * MASKED
        # The mask has all heads, though they are alike: adding it to scores of another shape
        # would cost a copy of both in every layer.
        full = (mask.shape[0], self.kv_heads, self.queries, first)
        return "token", writes, ops.broadcast_to(mask, full)

    def chunk_step(self, t: int, positions: Tensor, used_blocks: int) -> tuple[Any, ...]:
        """The same for a chunk of one user's prompt.

        Args:
            t: tokens of the chunk, padding included.
            positions: int32 [1, 2], where the chunk begins and how many tokens it really has.
            used_blocks: how many cache blocks hold everything up to its end.

        Returns:
            For the one cell: "chunk", (for each used block what `KVBlock.extend` needs), mask
            [1, kv_heads, queries * t, used positions].
        """
        start, length = positions[:, 0], positions[:, 1]
        pieces: tuple[Any, ...] = ()
        first = 0
        for number in range(used_blocks):
            last = first + self.layout.block_lengths[number]
            offset = ops.arange(first, last, 1, dtype=ms.int32) - start
            shape = (1, 1, last - first, 1)
            fresh = ops.logical_and(offset >= 0, offset < length)
            index = ops.select(fresh, offset, ops.zeros_like(offset))
            pieces = (*pieces, (index, (offset < 0).reshape(shape), fresh.reshape(shape)))
            first = last
        columns = ops.arange(0, first, 1, dtype=ms.int32).reshape(1, 1, 1, first)
        own = (ops.arange(0, t, 1, dtype=ms.int32) + start).reshape(1, 1, t, 1)
        mask = ops.cast(columns > own, self.softmax_type) * MASKED
        mask = ops.broadcast_to(mask, (self.kv_heads, self.queries, t, first))
        mask = mask.reshape(1, self.kv_heads, self.queries * t, first)
        return (("chunk", pieces, mask),)
