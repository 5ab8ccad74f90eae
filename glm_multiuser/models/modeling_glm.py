"""ChatGLM-6B, with the keys and values of every user inside its layers.

What it computes follows the published PyTorch model (`modeling_chatglm.py` of THUDM/chatglm-6b):
DeepNorm residuals on the normed input, a plain tanh-GELU MLP of four times the width,
two-dimensional rotary positions, and a context that sees itself in both directions.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.config import ModelConfig
from glm_multiuser.models.attention import MASKED, ScaledSoftmax
from glm_multiuser.models.graphs import User
from glm_multiuser.models.kv_past import NO_USERS, CellLayout
from glm_multiuser.models.layers import Embedding, LayerNorm, Linear, Numerics, zeros
from glm_multiuser.models.rotary import RotaryEmbedding2D
from glm_multiuser.models.stream_chat import StreamChat
from glm_multiuser.models.users import MOST_PROMPTS, MultiUserLayer, MultiUserModel


class MLP(nn.Cell):
    """hidden -> inner -> hidden, with a GELU between."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.inner_hidden_size
        self.dense_h_to_4h = Linear(hidden, inner, numerics, gelu=True)
        self.dense_4h_to_h = Linear(inner, hidden, numerics)

    def construct(self, hidden: Tensor, alpha: Any, used: Any) -> Tensor:
        """What the MLP makes of `hidden`, and `alpha` times `hidden`."""
        return self.dense_4h_to_h(self.dense_h_to_4h(hidden, used), used, hidden, alpha)


class SelfAttention(nn.Cell):
    """Queries, keys and values of new tokens, and the way back from what they attended to."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        numerics: Numerics,
        rotary: RotaryEmbedding2D,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads, self.head_dim, self.hidden = config.num_attention_heads, config.head_dim, hidden
        self.query_scale = 1.0 / (math.sqrt(config.head_dim) * layer_number)
        self.query_key_value = Linear(hidden, 3 * hidden, numerics)
        self.dense = Linear(hidden, hidden, numerics)
        self.rotary = rotary
        self.split = ops.Split(axis=1, output_num=2)

    def project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """`hidden` [rows, hidden_size] -> scaled query, key, value `[rows, heads, head_dim]`."""
        rows = hidden.shape[0]
        projected = self.query_key_value(hidden)
        query_key = projected[:, : 2 * self.hidden].reshape(rows, 2 * self.heads, self.head_dim)
        value = projected[:, 2 * self.hidden :].reshape(rows, self.heads, self.head_dim)
        query, key = self.split(self.rotary(query_key, angles[0], angles[1]))
        return query * self.query_scale, key, value


class DeepNormWithGLULayer(MultiUserLayer):
    """One transformer layer (named as in MindFormers) and its users' keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        numerics: Numerics,
        rotary: RotaryEmbedding2D,
        layout: CellLayout,
    ) -> None:
        hidden = config.hidden_size
        super().__init__(
            config,
            ScaledSoftmax(layer_number, numerics),
            numerics,
            rotary,
            layout,
            columns=(0, hidden, 2 * hidden),
        )
        depth = config.deepnorm_layers or config.num_layers
        alpha = math.sqrt(2.0 * depth)
        self.alpha = Tensor([alpha], ms.float32) if numerics.native else alpha
        self.number = Tensor([layer_number - 1], ms.int32)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.attention = SelfAttention(config, layer_number, numerics, rotary)
        self.post_attention_layernorm = LayerNorm(
            config.hidden_size, config.layernorm_epsilon, numerics
        )
        self.mlp = MLP(config, numerics)

    def construct(
        self,
        hidden: Tensor,
        angles: Any,
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
            step: for new tokens, what `decode_step` made; for prompts, bool `[prompts, 1, t, 1]`
                that says which tokens are real. With native kernels there is nothing else but
                this: what `AttendOwn` takes, then plan and saved as `LayerNorm.at_layer` does.
        """
        used = None
        if self.native:
            users, positions, _, angles, plan, saved = step
            normed, used = self.input_layernorm.at_layer(hidden, plan, self.number, saved)
            projected = self.attention.query_key_value(normed, used)
            own = (users, positions, used, angles)
            context = self.attend_own(projected, projected, projected, own)
        else:
            normed = self.input_layernorm(hidden)
            query, key, value = self.attention.project(normed, angles)
            if mask is None:
                context = self.attend_past(query, key, value, user, step)
            else:
                context = self.attend_prompt(query, key, value, mask, user, step)
        hidden = self.attention.dense(context, used, normed, self.alpha)
        return self.mlp(self.post_attention_layernorm(hidden, used), self.alpha, used)

    def attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, user: Any, real: Any
    ) -> Tensor:
        t = mask.shape[-1]
        query = self.prompt_query(query, t)
        key, value = self.prompt_keys(key, t), self.prompt_keys(value, t)
        if user is not None:
            cell, rows = user
            blocks = (self.cut(key, real), self.cut(value, real))
            query = self.kv_past[cell](query, blocks[0], blocks[1], rows, ())
        return self.attend_itself(query, key, value, mask)

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


class GLMModel(nn.Cell):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, numerics: Numerics, layout: CellLayout) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.word_embeddings = Embedding(
            config.vocab_size, config.hidden_size, numerics, name="embedding_table"
        )
        self.rotary = RotaryEmbedding2D(config.head_dim, config.max_sequence_length + 1, numerics)
        self.layers = nn.CellList(
            [
                DeepNormWithGLULayer(config, number + 1, numerics, self.rotary, layout)
                for number in range(config.num_layers)
            ]
        )
        self.final_layernorm = LayerNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.native = numerics.native
        self.number = Tensor([config.num_layers], ms.int32)
        self.set_positions(layout.seq_length)

    def set_positions(self, positions: int) -> None:
        """Room for a prompt of so many tokens that waits between two layers."""
        if self.native and positions:
            waiting = zeros(positions, self.hidden_size, dtype=ms.float32)
            self.waiting = Parameter(waiting, name="waiting", requires_grad=False)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Any,
        mask: Optional[Tensor] = None,
        user: Any = None,
        step: Any = None,
    ) -> Tensor:
        """`input_ids` [rows], `position_ids` [2, rows] -> hidden states `[rows, hidden_size]`.

        The other arguments are those of `DeepNormWithGLULayer.construct`.
        """
        if self.native:
            hidden = self.word_embeddings(input_ids, step[2])
            step = (*step, self.waiting)
            for layer in self.layers:
                hidden = layer(hidden, None, None, None, step)
            return self.final_layernorm.at_layer(hidden, step[4], self.number, self.waiting)[0]
        hidden = self.word_embeddings(input_ids)
        angles = self.rotary.tables(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles, mask, user, step)
        return self.final_layernorm(hidden)


class GLMForMultiUser(MultiUserModel, StreamChat):
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
        super().__init__(config, numerics, layout)
        self.config: ModelConfig = config
        self.transformer = GLMModel(config, self.numerics, layout)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, self.numerics, has_bias=False)
        self.heads = config.num_attention_heads

    def layer_cells(self) -> nn.CellList:
        """Every layer, in order."""
        return self.transformer.layers

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
        return self.next_tokens(hidden, self.logits(hidden))

    def set_layout(self, layout: CellLayout) -> None:
        super().set_layout(layout)
        self.transformer.set_positions(layout.seq_length)

    def tokens_of_users(self, input_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.transformer(input_ids, None, None, None, step)

    def logits(self, hidden: Tensor, used: Any = None) -> Tensor:
        return self.lm_head(hidden, used)

    def prompt_mask(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` [n, 2] -> mask [n, heads, length, length], real [n, 1, length, 1]."""
        prompts = positions.shape[0]
        columns = ops.arange(0, length, 1, dtype=ms.int32)
        rows = columns.reshape(1, 1, length, 1)
        context_lengths = positions[:, 0].reshape(prompts, 1, 1, 1)
        unseen = ops.logical_and(columns > rows, columns >= context_lengths)
        mask = ops.cast(unseen, self.softmax_type) * MASKED
        real = rows < positions[:, 1].reshape(prompts, 1, 1, 1)
        return ops.broadcast_to(mask, (prompts, self.heads, length, length)), real
