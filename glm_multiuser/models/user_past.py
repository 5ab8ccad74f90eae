"""The keys and values of users in one layer, where native kernels find them.

The kernels take the Parameters of all cells, write new rows in place, and read exactly the rows in
use. What lies behind them is never read, so a slot is handed on as it is. How many cells there are
changes nothing but what compiling costs: a graph with hundreds of Parameters takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from glm_multiuser.config import AnyModelConfig
from glm_multiuser.kernels import operators
from glm_multiuser.kernels.packing import TILE
from glm_multiuser.models.layers import zeros

if TYPE_CHECKING:
    from glm_multiuser.models.users import MultiUserModel


class OwnPast(nn.Cell):
    """The home of one or more users.

    Keys are float32 `[users, heads, tiles, head_dim, TILE]`: those of `TILE` positions lie side by
    side, so that their scores are computed side by side. Values are `[users, heads, positions,
    head_dim]`.
    """

    def __init__(self, users: int, heads: int, positions: int, head_dim: int) -> None:
        super().__init__()
        tiles = math.ceil(positions / TILE)
        keys = zeros(users, heads, tiles, head_dim, TILE, dtype=ms.float32)
        values = zeros(users, heads, positions, head_dim, dtype=ms.float32)
        self.key_past = Parameter(keys, name="key_past", requires_grad=False)
        self.value_past = Parameter(values, name="value_past", requires_grad=False)


class AttendOwn(nn.Cell):
    """Every token of a step over its own user's past, in one operator.

    Args:
        config: of the model.
        columns: where queries, keys and values begin in the rows that hold them.
    """

    def __init__(self, config: AnyModelConfig, columns: tuple[int, int, int]) -> None:
        super().__init__()
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.settings = Tensor([*sizes, *columns], ms.int32)
        self.scale = Tensor([1.0 / math.sqrt(config.head_dim)], ms.float32)
        self.attention = operators.attention(config.num_attention_heads * config.head_dim)

    def construct(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
        rotary: tuple[Tensor, ...],
        past: tuple[Parameter, ...],
    ) -> Tensor:
        """-> what each token attended to, `[tokens, hidden_size]`.

        Args:
            rows: what holds queries, keys and values, each `[tokens, *]`, not rotated.
            step: users int32 [tokens]; positions int32 [2, tokens], where each token is written
                and how many positions it sees; used int32 [1]; angles int32 [parts, tokens].
            rotary: cosines, signed sines, partners.
            past: keys and values of each cell in turn.
        """
        users, positions, used, angles = step
        return self.attention(
            *rows, used, users, positions, angles, *rotary, self.settings, self.scale, *past
        )


def read_user_past(model: MultiUserModel, user: int, positions: int) -> list[NDArray[Any]]:
    """Copies the first `positions` positions of one user's keys and values to the host."""
    tiles = math.ceil(positions / TILE)
    saved = []
    for keys, values in _rows_of(model, user):
        saved += [keys[:, :tiles].copy(), values[:, :positions].copy()]
    return saved


def write_user_past(model: MultiUserModel, user: int, saved: list[NDArray[Any]]) -> None:
    """Puts back what `read_user_past` copied, of this user or of another."""
    arrays = iter(saved)
    for rows in _rows_of(model, user):
        for row in rows:
            array = next(arrays)
            row[:, : array.shape[1]] = array


def _rows_of(model: MultiUserModel, user: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """A user's keys and values of each layer; on the CPU, arrays are the Parameters' own memory."""
    cell, row = divmod(user, model.layout.users_per_cell)
    for layer in model.layer_cells():
        past = layer.kv_past[cell]
        yield past.key_past.asnumpy()[row], past.value_past.asnumpy()[row]
