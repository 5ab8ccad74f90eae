"""The entry cells that an engine compiles for one layout of the caches.

MindSpore frees compiled graphs with the cell that they were compiled for. A change of layout
therefore makes new entry cells around the same model, and drops the old ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from glm_multiuser.models.layers import NUMPY_TYPES

if TYPE_CHECKING:
    from glm_multiuser.models.users import MultiUserModel

User = Union[int, Tensor]


class Forward(nn.Cell):
    """A model's `construct`, as a graph of its own."""

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User],
        used_blocks: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = self.model(
            input_ids, position_ids, positions, user, used_blocks
        )
        return results


class ForwardUsers(nn.Cell):
    """Any tokens of any users in one step, by native kernels.

    One graph for every step: of its height, a step uses as many rows as it needs.
    """

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.gather = ops.Gather()

    def construct(
        self,
        input_ids: Tensor,
        users: Tensor,
        positions: Tensor,
        used: Tensor,
        angles: Tensor,
        plan: Tensor,
        rows: Tensor,
        rows_used: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what `MultiUserModel.next_tokens` returns, for the rows that have a next token.

        Args:
            input_ids: int32 [tokens].
            users: int32 [tokens], whose each token is.
            positions: int32 [2, tokens]: where it is written, and how many positions it sees.
            used: int32 [1], how many tokens are new in this step.
            angles: int32 [parts, tokens], rotary positions.
            plan: int32 [4], which tokens are in which layers, as `LayerNorm.at_layer` takes it;
                in a causal model all of them are.
            rows: int32 [n], the tokens that have a next token.
            rows_used: int32 [1], how many of those there are.
        """
        hidden = self.model.tokens_of_users(input_ids, (users, positions, used, angles, plan))
        hidden = self.gather(hidden, rows, 0)
        results: tuple[Tensor, Tensor, Tensor] = self.model.next_tokens(
            hidden, self.model.logits(hidden, rows_used), rows_used
        )
        return results


class ReplacePast(nn.Cell):
    """Overwrites one block of one user's keys and values in every layer.

    It is how a block that an earlier user wrote becomes new memory, and how a paused user's keys
    and values come back after a resize. One small graph per block, whoever the user is.
    """

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.layers = model.layer_cells()

    def construct(self, user: User, past: Tensor, block: int) -> Tensor:
        """`past` [layers * 2, 1, heads, positions, head_dim]: key and value of each layer."""
        cell, rows = self.model.home(user)
        done = rows
        for number in range(len(self.layers)):
            key, value = (past[2 * number],), (past[2 * number + 1],)
            done = self.layers[number].kv_past[cell](done, key, value, rows, (), block)
        return done


def zero_past(model: MultiUserModel, positions: int) -> Tensor:
    """What a block of so many positions of new memory looks like, for `ReplacePast`."""
    config = model.config
    shape = (
        2 * config.num_layers,
        1,
        config.num_key_value_heads,
        positions,
        config.head_dim,
    )
    return Tensor(np.zeros(shape, NUMPY_TYPES[model.numerics.compute_type]))


def read_past(model: MultiUserModel, user: int, block: int) -> NDArray[Any]:
    """Copies one block of one user's keys and values to the host, shaped as for `ReplacePast`."""
    cell, row = divmod(user, model.layout.users_per_cell)
    parameters: list[Any] = []
    for layer in model.layer_cells():
        kv_block = layer.kv_past[cell].blocks[block]
        parameters += [kv_block.key_past, kv_block.value_past]
    return np.stack([parameter.asnumpy()[row : row + 1] for parameter in parameters])
