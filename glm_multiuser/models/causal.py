"""What the causal families share: layers with norms in front, and prompts that enter in chunks.

A family adds how it names its weights, and how it makes queries, keys and values of a token.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import mindspore as ms
from mindspore import Tensor, ops

from glm_multiuser.config import CausalConfig
from glm_multiuser.models.attention import MASKED, ScaledSoftmax
from glm_multiuser.models.graphs import User
from glm_multiuser.models.kv_past import NO_USERS, CellLayout
from glm_multiuser.models.layers import Numerics, RMSNorm
from glm_multiuser.models.rotary import RotaryEmbedding
from glm_multiuser.models.users import MOST_PROMPTS, MultiUserLayer, MultiUserModel


class CausalLayer(MultiUserLayer):
    """Attention, then the MLP, each behind a norm and added to what came in.

    Subclasses make `self.mlp` and say how to `project`, `project_own` and `output`.
    """

    def __init__(
        self,
        config: CausalConfig,
        numerics: Numerics,
        rotary: RotaryEmbedding,
        layout: CellLayout,
        columns: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        softmax = ScaledSoftmax(1, numerics)
        super().__init__(config, softmax, numerics, rotary, layout, columns)
        self.query_scale = 1.0 / math.sqrt(config.head_dim)
        self.one = Tensor([1.0], ms.float32) if numerics.native else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon, numerics)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.layernorm_epsilon, numerics
        )

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[rows, hidden_size]` -> query `[rows, heads, head_dim]`, key and value likewise."""
        raise NotImplementedError

    def project_own(self, normed: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What holds queries, keys and values of any tokens, as `attend_own` takes it."""
        raise NotImplementedError

    def output(self, context: Tensor, used: Any, hidden: Tensor) -> Tensor:
        """`[rows, heads * head_dim]` -> `[rows, hidden_size]`, with `hidden` added."""
        raise NotImplementedError

    def construct(self, hidden: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        """`hidden` [rows, hidden_size] -> the same shape.

        Args:
            hidden: rows of a chunk, or one new token of each user.
            angles: rotary cosines and sines of the rows.
            user: (cell, rows in the cell) whose keys and values these are; None: every user in
                order.
            step: what `decode_step` or `chunk_step` made; a mask `[1, 1, queries * t, t]` for
                whole prompts of which nothing is cached. With native kernels there is nothing
                else but this, as `AttendOwn` takes it.
        """
        if self.native:
            used = step[2]
            rows = self.project_own(self.input_layernorm(hidden, used), used)
            context = self.attend_own(rows[0], rows[1], rows[2], step[:4])
            hidden = self.output(context, used, hidden)
            return self.mlp(self.post_attention_layernorm(hidden, used), used, hidden, self.one)
        query, key, value = self.project(self.input_layernorm(hidden))
        query = self.rotary(query, angles[0], angles[1]) * self.query_scale
        key = self.rotary(key, angles[0], angles[1])
        if isinstance(step, Tensor):
            t = step.shape[-1]
            context = self.attend_itself(
                self.prompt_query(query, t),
                self.prompt_keys(key, t),
                self.prompt_keys(value, t),
                step,
            )
        elif step[0][0] == "chunk":
            cell, rows = user
            t = hidden.shape[0]
            past = self.kv_past[cell](
                self.prompt_query(query, t),
                self.prompt_keys(key, t),
                self.prompt_keys(value, t),
                rows,
                step[0],
            )
            context = self.rows(past, t)
        else:
            context = self.attend_past(query, key, value, user, step)
        hidden = self.output(context, None, hidden)
        return self.mlp(self.post_attention_layernorm(hidden), None, hidden, self.one)


class CausalForMultiUser(MultiUserModel):
    """A causal model for many users.

    Subclasses say what `hidden_states` and `logits` are, beside what every model does.

    Args:
        config: the shape of the model.
        numerics: types to compute in; default float32.
        layout: where each user's keys and values live; default: nothing is cached.
    """

    def __init__(
        self,
        config: CausalConfig,
        numerics: Optional[Numerics] = None,
        layout: CellLayout = NO_USERS,
    ) -> None:
        super().__init__(config, numerics, layout)
        self.rotary = RotaryEmbedding(config, self.numerics)

    def set_layout(self, layout: CellLayout) -> None:
        super().set_layout(layout)
        if layout.seq_length > self.rotary.positions:
            self.rotary.set_positions(layout.seq_length)

    def hidden_states(self, input_ids: Tensor, angles: Any, user: Any, step: Any) -> Tensor:
        """`input_ids` [rows] -> what the last norm makes of them, `[rows, hidden_size]`."""
        raise NotImplementedError

    def tokens_of_users(self, input_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.hidden_states(input_ids, None, None, step)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User] = None,
        used_blocks: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk of one user's prompt, or one new token of each named user.

        Args:
            input_ids: int32 [rows]; new tokens may have more rows than users.
            position_ids: int32 [rows].
            positions: for a chunk int32 [1, 2], where it begins and how many of its tokens are
                real; for new tokens int32 [users], where each is written, -1 for a row that is
                not in use.
            user: as in `GLMForMultiUser.construct`; one for a chunk.
            used_blocks: how many cache blocks hold everything, the new tokens included.

        Returns:
            For each row (for a chunk: its last real token, `MOST_PROMPTS` times): what
            `MultiUserModel.next_tokens` returns.
        """
        home = None if user is None else self.home(user)
        angles = self.rotary.tables(position_ids)
        if positions.ndim == 2:
            step = self.chunk_step(input_ids.shape[0], positions, used_blocks)
            hidden = self.hidden_states(input_ids, angles, home, step)
            # More rows than one, because a product of one row rounds in a way of its own.
            hidden = self.gather(hidden, ops.tile(positions[:, 1] - 1, (MOST_PROMPTS,)), 0)
        else:
            step = self.decode_step(positions, home, used_blocks)
            hidden = self.hidden_states(input_ids, angles, home, step)
        return self.next_tokens(hidden, self.logits(hidden))

    def whole_prompts(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits of every position of whole sequences; nothing is cached. For training.

        Args:
            input_ids: int32 [sequences, t].
            position_ids: int32 [sequences * t].

        Returns:
            `[sequences * t, vocab_size]`.
        """
        t = input_ids.shape[1]
        columns = ops.arange(0, t, 1, dtype=ms.int32)
        mask = ops.cast(columns > columns.reshape(t, 1), self.softmax_type) * MASKED
        mask = ops.tile(mask, (self.queries, 1)).reshape(1, 1, self.queries * t, t)
        angles = self.rotary.tables(position_ids)
        return self.logits(self.hidden_states(input_ids.reshape(-1), angles, None, mask))
