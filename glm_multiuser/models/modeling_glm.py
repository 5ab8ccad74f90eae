"""ChatGLM-6B, with the keys and values of every user inside its layers.

What it computes follows the published PyTorch model (`modeling_chatglm.py` of THUDM/chatglm-6b):
DeepNorm residuals on the normed input, a plain tanh-GELU MLP of four times the width,
two-dimensional rotary positions, and a context that sees itself in both directions.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.config import ModelConfig
from glm_multiuser.models.attention import MASKED, ScaledSoftmax, SelfAttention
from glm_multiuser.models.graphs import User
from glm_multiuser.models.kv_past import NO_USERS, CellLayout, KVPast
from glm_multiuser.models.layers import (
    LayerNorm,
    Linear,
    Numerics,
    RotaryEmbedding2D,
    TanhGelu,
    zeros,
)
from glm_multiuser.models.stream_chat import StreamChat

MOST_PROMPTS = 4
"""Prompts that one graph call takes in at most."""


class MLP(nn.Cell):
    """hidden -> inner -> hidden, with a GELU between."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.inner_hidden_size
        self.dense_h_to_4h = Linear(hidden, inner, numerics)
        self.dense_4h_to_h = Linear(inner, hidden, numerics)
        self.gelu = TanhGelu()

    def construct(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.gelu(self.dense_h_to_4h(hidden)))


class DeepNormWithGLULayer(nn.Cell):
    """One transformer layer (named as in MindFormers) and its users' keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        numerics: Numerics,
        rotary: RotaryEmbedding2D,
        layout: CellLayout,
    ) -> None:
        super().__init__()
        depth = config.deepnorm_layers or config.num_layers
        self.alpha = math.sqrt(2.0 * depth)
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.numerics = numerics
        self.softmax = ScaledSoftmax(layer_number, numerics)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.attention = SelfAttention(config, layer_number, numerics, rotary, self.softmax)
        self.post_attention_layernorm = LayerNorm(
            config.hidden_size, config.layernorm_epsilon, numerics
        )
        self.mlp = MLP(config, numerics)
        self.set_layout(layout)

    def set_layout(self, layout: CellLayout) -> None:
        """Gives every user of `layout` a home of zeros; what was cached before is dropped."""
        self.layout = layout
        self.kv_past = nn.CellList(
            [
                KVPast(
                    users,
                    self.heads,
                    self.head_dim,
                    layout.block_lengths,
                    self.softmax,
                    self.numerics.compute_type,
                )
                for users in layout.sizes
            ]
        )

    def construct(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Optional[Tensor],
        user: Any,
        step: Any,
    ) -> Tensor:
        """`hidden` [rows, hidden_size] -> the same shape.

        Args:
            hidden: rows of one or more whole prompts, or one new token of each user.
            angles: rotary cosines and sines of the rows.
            mask: for prompts, broadcast to `[prompts, heads, t, t]`; None for new tokens.
            user: (cell, rows in the cell) whose keys and values these are. None: for new tokens
                every user in order; for prompts nobody, nothing is cached.
            step: for new tokens, what `GLMForMultiUser.decode_step` made; for prompts, bool
                `[prompts, 1, t, 1]` that says which tokens are real.
        """
        normed = self.input_layernorm(hidden)
        query, key, value = self.attention.project(normed, angles)
        if mask is None:
            context = self.attend_past(query, key, value, user, step)
        else:
            context = self.attend_prompt(query, key, value, mask, user, step)
        hidden = normed * self.alpha + self.attention.dense(context)
        normed = self.post_attention_layernorm(hidden)
        return normed * self.alpha + self.mlp(normed)

    def attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, user: Any, real: Any
    ) -> Tensor:
        shape = (-1, mask.shape[-1], self.heads, self.head_dim)
        query = ops.transpose(query.reshape(shape), (0, 2, 1, 3))
        key = ops.transpose(key.reshape(shape), (0, 2, 1, 3))
        value = ops.transpose(value.reshape(shape), (0, 2, 1, 3))
        if user is not None:
            cell, rows = user
            blocks = (self.cut(key, real), self.cut(value, real))
            query = self.kv_past[cell](query, blocks[0], blocks[1], rows, ())
        return self.attention(query, key, value, mask)

    def cut(self, x: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """`x` [n, heads, t, head_dim] -> one piece per cache block, zero behind the last token."""
        x = ops.select(real, x, ops.zeros_like(x))
        blocks: tuple[Tensor, ...] = ()
        first = 0
        for length in self.layout.block_lengths:
            if first < x.shape[2]:
                piece = x if x.shape[2] <= length else x[:, :, first : first + length]
                missing = length - piece.shape[2]
                if missing > 0:
                    rest = ops.zeros((x.shape[0], self.heads, missing, self.head_dim), x.dtype)
                    piece = ops.concat((piece, rest), 2)
                blocks = (*blocks, piece)
            first = first + length
        return blocks

    def attend_past(
        self, query: Tensor, key: Tensor, value: Tensor, user: Any, step: Any
    ) -> Tensor:
        rows = query.shape[0]
        query = query.reshape(rows, self.heads, 1, self.head_dim)
        if user is not None:
            cell, cell_rows = user
            count = cell_rows.shape[0]
            context = self.kv_past[cell](
                first_rows(query, count),
                first_rows(key, count).reshape(-1, self.head_dim),
                first_rows(value, count).reshape(-1, self.head_dim),
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
        missing = rows - context.shape[0]
        if missing > 0:
            context = ops.concat(
                (context, ops.zeros((missing, context.shape[1]), context.dtype)), 0
            )
        return context


def rows_between(x: Tensor, first: int, last: int) -> Tensor:
    # A slice of everything is not free on CPU: it copies, slowly.
    return x if first == 0 and last == x.shape[0] else x[first:last]


def first_rows(x: Tensor, count: int) -> Tensor:
    return rows_between(x, 0, count)


class GLMModel(nn.Cell):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, numerics: Numerics, layout: CellLayout) -> None:
        super().__init__()
        self.word_embeddings = nn.Cell()
        self.word_embeddings.embedding_table = Parameter(
            zeros(config.vocab_size, config.hidden_size, dtype=numerics.compute_type),
            name="embedding_table",
        )
        self.rotary = RotaryEmbedding2D(config.head_dim, config.max_sequence_length + 1, numerics)
        self.layers = nn.CellList(
            [
                DeepNormWithGLULayer(config, number + 1, numerics, self.rotary, layout)
                for number in range(config.num_layers)
            ]
        )
        self.final_layernorm = LayerNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.gather = ops.Gather()

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Optional[Tensor] = None,
        user: Any = None,
        step: Any = None,
    ) -> Tensor:
        """`input_ids` [rows], `position_ids` [2, rows] -> hidden states `[rows, hidden_size]`.

        The other arguments are those of `DeepNormWithGLULayer.construct`.
        """
        hidden = self.gather(self.word_embeddings.embedding_table, input_ids, 0)
        angles = self.rotary.tables(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles, mask, user, step)
        return self.final_layernorm(hidden)


class GLMForMultiUser(nn.Cell, StreamChat):
    """ChatGLM-6B for many users.

    Args:
        config: the shape of the model.
        numerics: types to compute in; default float32.
        layout: where each user's keys and values live; default: nothing is cached.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Optional[Numerics] = None,
        layout: CellLayout = NO_USERS,
    ) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics or Numerics()
        self.layout = layout
        self.transformer = GLMModel(config, self.numerics, layout)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, self.numerics, has_bias=False)
        self.softmax_type = self.numerics.softmax_type
        self.heads = config.num_attention_heads
        self.head_numbers = Tensor(np.arange(self.heads), ms.int32).reshape(1, -1, 1)
        self.columns = Tensor(np.arange(config.max_sequence_length), ms.int32)
        self.first_rows = Tensor(np.arange(MOST_PROMPTS), ms.int32)
        self.argmax = ops.Argmax(axis=-1, output_type=ms.int32)
        self.gather = ops.Gather()

    def set_layout(self, layout: CellLayout) -> None:
        """Rebuilds every layer's cells; graphs of the old layout must not be used again."""
        self.layout = layout
        for layer in self.transformer.layers:
            layer.set_layout(layout)

    def linears(self) -> list[Linear]:
        """One linear layer of each shape."""
        layer = self.transformer.layers[0]
        return [
            layer.attention.query_key_value,
            layer.attention.dense,
            layer.mlp.dense_h_to_4h,
            layer.mlp.dense_4h_to_h,
            self.lm_head,
        ]

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User] = None,
        used_blocks: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whole prompts (`used_blocks` 0), or one new token of each named user.

        Args:
            input_ids: int32 [rows]; prompts, one behind the other, are padded to one length; new
                tokens may have more rows than users.
            position_ids: int32 [2, rows]: position in the context, position in the answer.
            positions: for 1, 2 or 4 prompts int32 [prompts, 2], context length and length of
                each; for new tokens int32 [users], where each is written, -1 for a row that is
                not in use.
            user: whose row(s): an int, a scalar Tensor, or, when one cell holds everybody, a
                Tensor [n] of n users, all different unless they bring the same prompt. None with
                new tokens: all users in order.
            used_blocks: with new tokens, how many cache blocks are in use.

        Returns:
            For each row (for prompts: `MOST_PROMPTS` rows, their last tokens in turn):
            the most likely next token, int32 [n]; 0 where all is finite and NaN where not,
            [n]; logits, [n, vocab_size] in the softmax type.
        """
        home = None if user is None else self.home(user)
        if used_blocks == 0:
            prompts = positions.shape[0]
            length = input_ids.shape[0] // prompts
            mask, real = self.prompt_mask(length, positions)
            hidden = self.transformer(input_ids, position_ids, mask, home, real)
            last = self.first_rows[:prompts] * length + positions[:, 1] - 1
            # Always as many rows, so that their bits do not depend on how many prompts there are.
            hidden = self.gather(hidden, ops.tile(last, (MOST_PROMPTS // prompts,)), 0)
        else:
            step = self.decode_step(positions, home, used_blocks)
            hidden = self.transformer(input_ids, position_ids, None, home, step)
        logits = ops.cast(self.lm_head(hidden), self.softmax_type)
        tokens = self.argmax(logits)
        best = ops.gather_d(logits, 1, tokens.reshape(-1, 1))
        finite = ops.sum(hidden * 0, 1) + best.reshape(-1) * 0
        return tokens, finite, logits

    def home(self, user: User) -> tuple[Any, Tensor]:
        """-> (cell, rows in the cell) of one user, or of several that share the only cell."""
        per_cell = self.layout.users_per_cell
        if not isinstance(user, Tensor):
            return user // per_cell, Tensor([user % per_cell], ms.int32)
        rows = ops.reshape(ops.cast(user, ms.int32), (-1,))
        if len(self.layout.sizes) == 1:
            return 0, rows
        return ops.reshape(rows // per_cell, ()), rows % per_cell

    def prompt_mask(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` [n, 2] -> mask [n, heads, length, length], real [n, 1, length, 1].

        The mask has all heads, though they are alike: adding it to scores of another shape would
        cost a copy of both in every layer.
        """
        prompts = positions.shape[0]
        columns = self.columns[:length]
        rows = columns.reshape(1, 1, length, 1)
        context_lengths = positions[:, 0].reshape(prompts, 1, 1, 1)
        unseen = ops.logical_and(columns > rows, columns >= context_lengths)
        mask = ops.cast(unseen, self.softmax_type) * MASKED
        real = rows < positions[:, 1].reshape(prompts, 1, 1, 1)
        return ops.broadcast_to(mask, (prompts, self.heads, length, length)), real

    def decode_step(self, positions: Tensor, home: Any, used_blocks: int) -> tuple[Any, ...]:
        """What all layers need to write and read the caches, made once per step.

        -> for each cell: (for each used block: (index int32 [n * heads, 3], inside bool
        [n * heads, 1])), mask [n, heads, 1, used positions].
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

    def cell_step(self, positions: Tensor, rows: Tensor, used_blocks: int) -> tuple[Any, Any]:
        shape = (positions.shape[0], self.heads, 1)
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
        columns = self.columns[:first].reshape(1, 1, 1, first)
        unseen = columns > positions.reshape(-1, 1, 1, 1)
        mask = ops.cast(unseen, self.softmax_type) * MASKED
        return writes, ops.broadcast_to(mask, (mask.shape[0], self.heads, 1, first))
