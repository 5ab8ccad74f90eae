"""Sessions: the saved state of a user's conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from numpy.typing import NDArray

CacheBytes = NDArray[Any]
"""uint8 [bytes]: keys or values in the cache's layout, which only the runner knows."""

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Session:
    """Token ids and their KV cache.

    Attributes:
        token_ids: of prompt and answer, as far as they were computed.
        pieces: their keys and values, in the runner's order; none if the model cannot reuse a KV
            cache.
    """

    token_ids: Sequence[int]
    pieces: Sequence[CacheBytes]

    @property
    def nbytes(self) -> int:
        """Bytes of token ids and KV cache."""
        return TOKEN_BYTES * len(self.token_ids) + sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class SessionInfo:
    """An entry in a list of sessions.

    Attributes:
        user: None if it has not been used since the start, because files contain no names.
        place: "slot", "memory" or "disk".
        tokens: number of tokens; None for a file, which is not opened.
        nbytes: size of the session; 0 in a slot.
    """

    user: Optional[Hashable]
    place: Literal["slot", "memory", "disk"]
    tokens: Optional[int]
    nbytes: int
