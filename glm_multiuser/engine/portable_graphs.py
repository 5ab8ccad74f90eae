"""The entry cells of the portable backend, which build padded batches from the inputs of a step.

MindSpore frees compiled graphs together with the cell that they were compiled for. A change of
layout therefore creates new entry cells for the same model, and drops the old ones.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.attention import MASKED, rows_between
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.backends.portable.types import NUMPY_TYPES, tensor_type
from glm_multiuser.engine.graph_shapes import MOST_PROMPTS, table_positions
from glm_multiuser.models.batch import (
    CellStep,
    ChunkBatch,
    DecodeBatch,
    Home,
    PaddedBatch,
    PromptBatch,
    Rotary,
)
from glm_multiuser.models.multi_user import MultiUserModel

User = Union[int, Tensor]
"""A Tensor uses one graph for all users, an int one graph for each."""


class PaddedBatches(nn.Cell):
    """Builds the batch of a step, once for all layers, for caches with this layout."""

    def __init__(self, model: MultiUserModel, layout: CellLayout) -> None:
        super().__init__()
        config, backend = model.config, model.backend
        if not isinstance(backend, PortableBackend):
            raise TypeError(f"the backend of this model is {backend.name!r}, not 'portable'")
        self.layout = layout
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.group = self.heads // self.kv_heads
        self.mask_type = tensor_type(backend.softmax_dtype)
        self.head_numbers = Tensor(np.arange(self.kv_heads), ms.int32).reshape(1, -1, 1)
        self.prompt_numbers = Tensor(np.arange(MOST_PROMPTS), ms.int32)
        dtype = NUMPY_TYPES[backend.dtype]
        cosine, sine = model.rotary.tables(table_positions(config, layout.seq_length))
        self.cosine, self.sine = Tensor(cosine.astype(dtype)), Tensor(sine.astype(dtype))
        self.partners = Tensor(model.rotary.partners.astype(dtype))
        self.parts = model.rotary.parts
        self.gather = ops.Gather()
        self.range = ops.Range()

    def construct(
        self,
        rows: int,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User],
        used_blocks: int,
    ) -> PaddedBatch:
        """The batch of `rows` rows; the other arguments are those of `PortableForward`."""
        rotary = self.rotary_of(position_ids)
        if used_blocks == 0:
            return self.prompts(rows, rotary, positions, user)
        if positions.ndim == 2:
            return self.chunk(rows, rotary, positions, user, used_blocks)
        return self.decode(rotary, positions, user, used_blocks)

    def answered(self, hidden: Tensor, positions: Tensor, used_blocks: int) -> Tensor:
        """The rows that have a next token.

        For prompts and chunks there are always `MOST_PROMPTS`, so that bits do not depend on their
        number; a product of a single row rounds differently.
        """
        if positions.ndim == 1:
            return hidden
        last = positions[:, 1] - 1
        if used_blocks == 0:
            prompts = positions.shape[0]
            last = self.prompt_numbers[:prompts] * (hidden.shape[0] // prompts) + last
            return self.gather(hidden, ops.tile(last, (MOST_PROMPTS // prompts,)), 0)
        return self.gather(hidden, ops.tile(last, (MOST_PROMPTS,)), 0)

    def numbers(self, first: int, last: int) -> Tensor:
        """`first` to `last - 1`, int32."""
        # Checks of arguments in `ops.arange` take a quarter of the compile time of a small graph.
        return ops.cast(self.range(first, last, 1), ms.int32)

    def rotary_of(self, position_ids: Tensor) -> Rotary:
        """Rows of the tables for `position_ids` [rows], or [parts, rows]."""
        if self.parts == 1:
            cosine = self.gather(self.cosine, position_ids.reshape(-1), 0)
            sine = self.gather(self.sine, position_ids.reshape(-1), 0)
        else:
            first, second = position_ids[0], position_ids[1]
            cosine = ops.concat(
                (self.gather(self.cosine, first, 0), self.gather(self.cosine, second, 0)), 1
            )
            sine = ops.concat(
                (self.gather(self.sine, first, 0), self.gather(self.sine, second, 0)), 1
            )
        shape = (cosine.shape[0], 1, -1)
        return {
            "cosine": cosine.reshape(shape),
            "sine": sine.reshape(shape),
            "partners": self.partners,
        }

    def home(self, user: User) -> Home:
        """The home of one user, or of several if there is only one cell."""
        per_cell = self.layout.users_per_cell
        if not isinstance(user, Tensor):
            return {"cell": user // per_cell, "rows": Tensor([user % per_cell], ms.int32)}
        rows = ops.reshape(ops.cast(user, ms.int32), (-1,))
        if len(self.layout.sizes) == 1:
            return {"cell": 0, "rows": rows}
        return {"cell": ops.reshape(rows // per_cell, ()), "rows": rows % per_cell}

    def prompts(
        self, rows: int, rotary: Rotary, positions: Tensor, user: Optional[User]
    ) -> PromptBatch:
        """Prompts with bidirectional contexts."""
        prompts = positions.shape[0]
        t = rows // prompts
        columns = self.numbers(0, t)
        own = columns.reshape(1, 1, t, 1)
        context_lengths = positions[:, 0].reshape(prompts, 1, 1, 1)
        unseen = ops.logical_and(columns > own, columns >= context_lengths)
        mask = ops.cast(unseen, self.mask_type) * MASKED
        mask = ops.broadcast_to(mask, (prompts, self.heads, t, t))
        mask = mask.reshape(prompts, self.kv_heads, self.group * t, t)
        real = own < positions[:, 1].reshape(prompts, 1, 1, 1)
        home = None if user is None else self.home(user)
        return {"rotary": rotary, "mask": mask, "real": real, "home": home}

    def chunk(
        self, t: int, rotary: Rotary, positions: Tensor, user: User, used_blocks: int
    ) -> ChunkBatch:
        """A chunk of one user's prompt, after the cached positions."""
        start, length = positions[:, 0], positions[:, 1]
        sources: tuple[Any, ...] = ()
        first = 0
        for number in range(used_blocks):
            last = first + self.layout.block_lengths[number]
            offset = self.numbers(first, last) - start
            shape = (1, 1, last - first, 1)
            written = ops.logical_and(offset >= 0, offset < length)
            token = ops.select(written, offset, ops.zeros_like(offset))
            kept, written = (offset < 0).reshape(shape), written.reshape(shape)
            sources = (*sources, {"token": token, "kept": kept, "written": written})
            first = last
        columns = self.numbers(0, first).reshape(1, 1, 1, first)
        own = (self.numbers(0, t) + start).reshape(1, 1, t, 1)
        mask = ops.cast(columns > own, self.mask_type) * MASKED
        mask = ops.broadcast_to(mask, (self.kv_heads, self.group, t, first))
        mask = mask.reshape(1, self.kv_heads, self.group * t, first)
        return {"rotary": rotary, "mask": mask, "sources": sources, "home": self.home(user)}

    def decode(
        self, rotary: Rotary, positions: Tensor, user: Optional[User], used_blocks: int
    ) -> DecodeBatch:
        """One new token of each user."""
        if user is not None:
            home = self.home(user)
            cell = self.cell_step(positions, home["rows"], used_blocks)
            return {"rotary": rotary, "cells": (cell,), "home": home}
        cells: tuple[Any, ...] = ()
        first = 0
        for size in self.layout.sizes:
            rows = self.numbers(0, size)
            cell_positions = rows_between(positions, first, first + size)
            cells = (*cells, self.cell_step(cell_positions, rows, used_blocks))
            first = first + size
        return {"rotary": rotary, "cells": cells, "home": None}

    def cell_step(self, positions: Tensor, rows: Tensor, used_blocks: int) -> CellStep:
        """One new token of each user in `rows` of a cell, -1 in `positions` for nowhere."""
        shape = (positions.shape[0], self.kv_heads, 1)
        position = ops.broadcast_to(positions.reshape(-1, 1, 1), shape)
        row = ops.broadcast_to(rows.reshape(-1, 1, 1), shape)
        head = ops.broadcast_to(self.head_numbers, shape)
        targets: tuple[Any, ...] = ()
        first = 0
        for number in range(used_blocks):
            length = self.layout.block_lengths[number]
            offset = position - first
            inside = ops.logical_and(offset >= 0, offset < length)
            offset = ops.select(inside, offset, ops.zeros_like(offset))
            index = ops.concat((row, head, offset), 2).reshape(-1, 3)
            targets = (*targets, {"index": index, "inside": inside.reshape(-1, 1)})
            first = first + length
        columns = self.numbers(0, first).reshape(1, 1, 1, first)
        unseen = columns > positions.reshape(-1, 1, 1, 1)
        mask = ops.cast(unseen, self.mask_type) * MASKED
        # The mask is broadcast to all heads, because adding it to scores of another shape would
        # copy both in every layer.
        full = (mask.shape[0], self.kv_heads, self.group, first)
        return {"targets": targets, "mask": ops.broadcast_to(mask, full)}


class PortableForward(nn.Cell):
    """One step of a model as a graph; its kind depends on shapes and `used_blocks`."""

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.batches = PaddedBatches(model, model.layout)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        positions: Tensor,
        user: Optional[User],
        used_blocks: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whole prompts (`used_blocks` 0), a chunk of a prompt, or one new token of each user.

        Args:
            input_ids: int32 [rows]; prompts are padded to one length and concatenated; new tokens
                may have more rows than users.
            position_ids: int32 [rows]; for ChatGLM-6B int32 [2, rows]: position in the context,
                position in the answer.
            positions: for 1, 2 or 4 prompts int32 [prompts, 2], context length and length of
                each; for a chunk int32 [1, 2], its start and its length without padding; for new
                tokens int32 [users], where each is written, -1 for unused rows.
            user: an int, a scalar Tensor, or, if one cell holds all users, a Tensor [n] of n users,
                all different unless they have the same prompt. None with new tokens: all users in
                order; with prompts: nothing is cached.
            used_blocks: for a chunk and for new tokens: how many cache blocks hold all positions,
                including the new ones.

        Returns:
            Results of `Backend.next_token` for each row; for prompts and chunks, `MOST_PROMPTS`
            rows with the last token of each prompt, or of the chunk, repeated.
        """
        batch = self.batches(input_ids.shape[0], position_ids, positions, user, used_blocks)
        hidden = self.model.hidden_states(input_ids, batch)
        hidden = self.batches.answered(hidden, positions, used_blocks)
        logits = self.model.logits(hidden, batch)
        tokens, finite, logits = self.model.next_token(hidden, logits, batch)
        return tokens, finite, logits


class WholeSequences(nn.Cell):
    """Logits of every position of whole sequences; nothing is cached. For training."""

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.batches = PaddedBatches(model, model.layout)

    def construct(
        self, input_ids: Tensor, position_ids: Tensor, mask: Optional[Tensor] = None
    ) -> Tensor:
        """`input_ids` int32 [sequences, t] -> logits `[sequences * t, vocab_size]`.

        Args:
            input_ids: padded to one length.
            position_ids: as in `PortableForward`.
            mask: 0 or `MASKED`, broadcast to `[sequences, kv_heads, group * t, t]`; None: no token
                sees a later one.
        """
        t = input_ids.shape[1]
        if mask is None:
            columns = self.batches.numbers(0, t)
            mask = ops.cast(columns > columns.reshape(t, 1), self.batches.mask_type) * MASKED
            mask = ops.tile(mask, (self.batches.group, 1))
            mask = mask.reshape(1, 1, self.batches.group * t, t)
        batch: PromptBatch = {
            "rotary": self.batches.rotary_of(position_ids),
            "mask": mask,
            "real": None,
            "home": None,
        }
        hidden = self.model.hidden_states(input_ids.reshape(-1), batch)
        return self.model.logits(hidden, batch)


class ReplaceCache(nn.Cell):
    """Overwrites one block of one user's keys and values in every layer.

    It clears blocks of an earlier user, and restores a paused user's keys and values after a
    resize. One small graph per block serves all users.
    """

    def __init__(self, model: MultiUserModel) -> None:
        super().__init__(auto_prefix=False)
        self.batches = PaddedBatches(model, model.layout)
        self.layers = model.layer_cells()

    def construct(self, user: User, past: Tensor, block: int) -> Tensor:
        """`past` [layers * 2, 1, heads, positions, head_dim]: key and value of each layer."""
        home = self.batches.home(user)
        done = home["rows"]
        for number in range(len(self.layers)):
            key, value = (past[2 * number],), (past[2 * number + 1],)
            cell = self.layers[number].attend.kv_past[home["cell"]]
            done = cell(done, key, value, home["rows"], {"block": block})
        return done


def empty_block(model: MultiUserModel, positions: int) -> Tensor:
    """Zeros for a block of `positions` positions, for `ReplaceCache`."""
    config = model.config
    shape = (2 * config.num_layers, 1, config.num_key_value_heads, positions, config.head_dim)
    return Tensor(np.zeros(shape, NUMPY_TYPES[model.backend.dtype]))


def read_block(model: MultiUserModel, user: int, block: int) -> NDArray[Any]:
    """Copies one block of one user's keys and values to the host, shaped as for `ReplaceCache`."""
    arrays = []
    for cell, row in model.caches_of(user):
        for parameter in (cell.blocks[block].key_past, cell.blocks[block].value_past):
            arrays.append(parameter.asnumpy()[row : row + 1])
    return np.stack(arrays)
