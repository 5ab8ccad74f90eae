"""What the engine needs of a model: a runner. It is all of the engine that calls the device.

Every method runs on the device thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import Step
from glm_multiuser.progress import Progress
from glm_multiuser.sessions.session import CacheBytes


class RowResults(Protocol):
    """What a graph says about the next token of the rows of `Step.answered`, and of those of
    `Step.scored` after them."""

    tokens: Sequence[int]
    """The most likely next token of each."""
    finite: Sequence[bool]
    """Whether everything that led to it was finite."""

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        """float32 [len(rows), vocab_size], brought to the host only when asked for."""


class Runner(Protocol):
    """What the engine needs of a model; tests put a mock in its place."""

    vocab_size: int

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """Tokens of each of the first prompts to prefill in the next step, in which so many
        requests decode; changes nothing."""

    def parts(self, step: Step) -> Sequence[Step]:
        """The steps that one graph each can run."""

    def run(self, step: Step) -> RowResults:
        """Runs one of `parts`; result rows in the order of `Step.answered`, and then of
        `Step.scored`."""

    def save(self, slot: int, request: Request) -> Any:
        """Copies a slot's keys and values to the host."""

    def cache_bytes(self, tokens: int) -> int:
        """Physical memory of a slot's caches that hold so many tokens."""

    def trim(self, slot: int, tokens: int) -> None:
        """Gives back the memory of a slot after its first `tokens`, where the system can take it.

        Nothing after them is read before it is written again.
        """

    def restore(self, slot: int, request: Request, saved: Any) -> None:
        """Puts into a slot what `save` copied out of this or another one."""

    def read_slot(self, slot: int, positions: int) -> Iterator[CacheBytes]:
        """Copies the keys and values of a slot's first positions to the host, piece by piece."""

    def write_slot(self, slot: int, positions: int, pieces: Sequence[CacheBytes]) -> Iterator[None]:
        """Puts the first positions of what `read_slot` copied into a slot, piece by piece.

        Raises:
            ValueError: the pieces are not those of a slot.
        """

    def slot_bytes(self, positions: int) -> int:
        """About what `read_slot` copies."""

    def fingerprint(self) -> str:
        """Hexadecimal digits: of all that keys and values depend on besides their tokens."""

    def resize(self, users: int, progress: Progress) -> None:
        """Lays the caches out for another number of users; what they held is gone."""

    def recover(self) -> None:
        """After an error of the device: makes the next step possible; what slots hold stays."""

    def close(self) -> None:
        """Frees the graphs."""

    @property
    def compiles(self) -> int:
        """Graphs compiled so far."""


@dataclass
class HostResults:
    """`RowResults` in memory of the host that the next step writes to again."""

    tokens: Sequence[int]
    finite: Sequence[bool]
    host_logits: NDArray[Any]

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        return self.host_logits[list(rows)]
