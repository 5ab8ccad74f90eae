"""A model that tests drive graph call by graph call, as an engine would.

All of it runs on the device thread, so tests may use several models in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor

from glm_multiuser import device
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.padding import invariant_rows
from glm_multiuser.engine.portable_graphs import ReplaceCache, read_block
from glm_multiuser.mindformers.glm_for_multi_user import GLMForMultiUser
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.weights import Fill, load_weights, weights_of


class Rows(NamedTuple):
    """What a graph says about the next token of each row."""

    tokens: np.ndarray
    finite: np.ndarray
    logits: np.ndarray


@dataclass
class Stream:
    """One sequence while it grows, and the logits that every new token came from."""

    token_ids: list[int]
    positions: PrefixPositions
    prompt_length: int
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    def take(self, rows: Rows, row: int) -> None:
        assert np.isfinite(rows.finite[row])
        self.logits.append(rows.logits[row])
        self.token_ids.append(int(rows.tokens[row]))


class DrivenModel:
    """A `GLMForMultiUser` and its small graphs.

    Args:
        config: the shape of the model.
        fill: puts the weights in.
        layout: users and blocks.
        backend: default float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        fill: Fill,
        layout: CellLayout,
        backend: Optional[PortableBackend] = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.cell = DEVICE_THREAD.call(lambda: self._build(fill, backend))
        self.replace_cache = DEVICE_THREAD.call(lambda: ReplaceCache(self.cell))

    @classmethod
    def of_folder(
        cls, folder: Path, layout: CellLayout, backend: Optional[PortableBackend] = None
    ) -> DrivenModel:
        config = ModelConfig.from_folder(folder)
        return cls(config, load_weights(folder, config), layout, backend)

    def _build(self, fill: Fill, backend: Optional[PortableBackend]) -> GLMForMultiUser:
        device.configure("CPU", 0)
        cell = GLMForMultiUser(self.config, backend)
        cell.set_train(False)
        fill(weights_of(cell), lambda done, total, what: None)
        cell.set_layout(self.layout)
        return cell

    def start(self, token_ids: Sequence[int]) -> Stream:
        positions = PrefixPositions.of(token_ids, self.config)
        return Stream(list(token_ids), positions, len(token_ids))

    def prefill(self, user: int, stream: Stream, padded: int, last: Optional[int] = None) -> Rows:
        """The whole prompt of `stream`, padded to a length that is compiled once.

        Args:
            last: the token whose logits to return; None: the last one of the prompt. It also
                ends what is cached.
        """
        input_ids = np.zeros(padded, int)
        input_ids[: len(stream.token_ids)] = stream.token_ids
        length = len(stream.token_ids) if last is None else last + 1
        positions = np.array([[stream.positions.context_length, length]])
        return self._run(input_ids, stream.positions.ids(0, padded), positions, np.array(user), 0)

    def decode(
        self,
        streams: Mapping[int, Stream],
        blocks: int = 1,
        users: Optional[Sequence[int]] = None,
        rows: Optional[int] = None,
    ) -> Rows:
        """One new token of each stream, by user; rows without a stream write nothing.

        Args:
            streams: user -> its sequence, whose last token is not cached yet.
            blocks: cache blocks to read.
            users: whose rows the graph has; None: everybody, in order.
            rows: rows of the matrix products, at least as many as users.
        """
        in_graph = range(self.layout.users) if users is None else users
        rows = rows or len(in_graph)
        input_ids, position_ids = np.zeros(rows, int), np.zeros((2, rows), int)
        positions = np.full(len(in_graph), -1)
        for row, user in enumerate(in_graph):
            if user in streams:
                stream, last = streams[user], len(streams[user].token_ids) - 1
                input_ids[row] = stream.token_ids[last]
                position_ids[:, row] = stream.positions.ids(last, last + 1)[:, 0]
                positions[row] = last
        user_tensor = None if users is None else np.array(users)
        return self._run(input_ids, position_ids, positions, user_tensor, blocks)

    def _run(
        self,
        input_ids: np.ndarray,
        position_ids: np.ndarray,
        positions: np.ndarray,
        users: Optional[np.ndarray],
        blocks: int,
    ) -> Rows:
        def call() -> Rows:
            inputs = [Tensor(values, ms.int32) for values in (input_ids, position_ids, positions)]
            user = None if users is None else Tensor(users, ms.int32)
            return Rows(*[result.asnumpy() for result in self.cell(*inputs, user, blocks)])

        return DEVICE_THREAD.call(call)

    def past(self, user: int) -> list[np.ndarray]:
        """Copies of a user's blocks, each [2 * layers, 1, heads, positions, head_dim]."""
        blocks = range(len(self.layout.block_lengths))
        return DEVICE_THREAD.call(
            lambda: [read_block(self.cell, user, block).copy() for block in blocks]
        )

    def set_past(self, user: int, past: Iterable[np.ndarray], first_block: int = 0) -> None:
        """Overwrites a user's blocks, from `first_block` on."""

        def call() -> None:
            for block, values in enumerate(past, first_block):
                self.replace_cache(Tensor(user, ms.int32), Tensor(values), block).asnumpy()

        DEVICE_THREAD.call(call)

    def invariant_rows(self, sizes: Sequence[int]) -> dict[int, int]:
        return DEVICE_THREAD.call(lambda: invariant_rows(self.cell, sizes))

    def answer_alone(
        self, user: int, token_ids: Sequence[int], count: int, padded: int, blocks: int
    ) -> Stream:
        """A greedy answer through graphs that serve the one user that a Tensor names."""
        stream = self.start(token_ids)
        stream.take(self.prefill(user, stream, padded), 0)
        while len(stream.answer) < count:
            stream.take(self.decode({user: stream}, blocks, [user]), 0)
        return stream

    def answer_together(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        padded: Sequence[int],
        blocks: int,
    ) -> list[Stream]:
        """Greedy answers of the first users, in the one graph that decodes everybody."""
        streams = [self.start(token_ids) for token_ids in prompts]
        for user, stream in enumerate(streams):
            stream.take(self.prefill(user, stream, padded[user]), 0)
        while True:
            running = {
                user: stream
                for user, stream in enumerate(streams)
                if len(stream.answer) < counts[user]
            }
            if not running:
                return streams
            rows = self.decode(running, blocks)
            for user, stream in running.items():
                stream.take(rows, user)
