"""Maps users to cells and rows of the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

BLOCK_LENGTH = 256
"""Positions per block of the portable backend; a decode step reads only the blocks in use."""


@dataclass(frozen=True)
class CellLayout:
    """Where every user's keys and values are, and how positions are divided into blocks.

    Attributes:
        users: total number of users.
        users_per_cell: rows of a cell; the last cell may have fewer.
        block_lengths: positions per block, in order.
    """

    users: int
    users_per_cell: int
    block_lengths: tuple[int, ...]

    @classmethod
    def plan(
        cls,
        users: int,
        seq_length: int,
        block_length: int = BLOCK_LENGTH,
        users_per_cell: Optional[int] = None,
    ) -> CellLayout:
        """Divides `seq_length` into blocks; without `users_per_cell`, one cell holds all users."""
        full, rest = divmod(seq_length, block_length)
        blocks = (block_length,) * full + (rest,) * (rest > 0)
        return cls(users, min(users_per_cell or users, users), blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Users of each cell."""
        full, rest = divmod(self.users, self.users_per_cell)
        return (self.users_per_cell,) * full + (rest,) * (rest > 0)

    @property
    def seq_length(self) -> int:
        """Positions per user."""
        return sum(self.block_lengths)

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that hold the first `positions` positions."""
        return math.ceil(positions / self.block_lengths[0])


NO_USERS = CellLayout(users=0, users_per_cell=1, block_lengths=())
"""No cache: for training and scoring."""
