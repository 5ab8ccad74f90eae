"""What is kept of a user's conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from numpy.typing import NDArray

CacheBytes = NDArray[Any]
"""uint8 [bytes]: keys or values as they lie in a cache; what they mean, the runner knows."""

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Session:
    """Token ids, and their keys and values.

    Attributes:
        token_ids: of prompt and answer, as far as they were computed.
        pieces: their keys and values, in the runner's order; none of a model that cannot go on
            from them.
    """

    token_ids: Sequence[int]
    pieces: Sequence[CacheBytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return TOKEN_BYTES * len(self.token_ids) + sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class SessionInfo:
    """One session in a list.

    Attributes:
        user: its name; None if it has not been used since the start: files hold no names.
        place: "slot", "memory" or "disk".
        tokens: how many of it are kept; None for a file, which is not opened for it.
        nbytes: that it takes; 0 in a slot.
    """

    user: Optional[Hashable]
    place: Literal["slot", "memory", "disk"]
    tokens: Optional[int]
    nbytes: int
