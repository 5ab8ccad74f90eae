"""The base class of models, whose layers hold the KV caches of all users."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore import Tensor, nn

from glm_multiuser.backends.cell_layout import NO_USERS, CellLayout
from glm_multiuser.backends.protocol import Backend
from glm_multiuser.model_config import AnyModelConfig
from glm_multiuser.models.batch import Batch
from glm_multiuser.models.rotary import RotaryEmbedding, rotary_of


class MultiUserModel(nn.Cell):
    """A model without users until `set_layout` is called.

    Args:
        config: the shape of the model.
        backend: creates its cells.

    Attributes:
        layout: where each user's keys and values are.
        rotary: the rotary embedding, as tables.
        next_token: `(hidden, logits, batch)` -> the next token of each row, see `Backend`.
    """

    def __init__(self, config: AnyModelConfig, backend: Backend) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.layout = NO_USERS
        self.rotary: RotaryEmbedding = rotary_of(config, backend.rotary_dtype)
        self.next_token = backend.next_token()

    def layer_cells(self) -> nn.CellList:
        """All layers, in order; the attention of each is `attend`."""
        raise NotImplementedError

    def hidden_states(self, input_ids: Tensor, batch: Batch) -> Tensor:
        """`input_ids` int32 [rows] -> output of the final norm, `[rows, hidden_size]`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden_size]` -> `[rows, vocab_size]`."""
        raise NotImplementedError

    def set_layout(self, layout: CellLayout) -> None:
        """Allocates an empty cache for every user of `layout` and drops the old ones.

        Graphs compiled for the old layout must not be used again.
        """
        self.layout = layout
        for layer in self.layer_cells():
            layer.attend.set_layout(layout)
        self.update_parameters_name()  # names must be unique within a graph

    def caches_of(self, user: int) -> Iterator[tuple[nn.Cell, int]]:
        """For each layer, the cell that holds this user's keys and values, and the row in it."""
        cell, row = divmod(user, self.layout.users_per_cell)
        for layer in self.layer_cells():
            yield layer.attend.kv_past[cell], row
