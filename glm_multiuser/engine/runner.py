"""The runner, which is the only part of an engine that calls the device.

All methods run on the device thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import Step
from glm_multiuser.progress import Progress
from glm_multiuser.sessions.session import CacheBytes


class RowResults(Protocol):
    """Results of the rows of `Step.answered`, followed by those of `Step.scored`."""

    tokens: Sequence[int]
    """The most likely next token of each row."""
    finite: Sequence[bool]
    """Whether the row's hidden state and best logit are finite."""

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        """float32 [len(rows), vocab_size], copied to the host only on demand."""


class Runner(Protocol):
    """Runs a model for an engine; tests use a mock."""

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """How many tokens of each of the first prompts to prefill in the next step, in which
        `decoding` requests decode; has no side effects."""

    def parts(self, step: Step) -> Sequence[Step]:
        """Splits a step into steps that a single graph can run."""

    def run(self, step: Step) -> RowResults:
        """Runs one of `parts`; result rows are in the order of `Step.answered`, then of
        `Step.scored`."""

    def cache_bytes(self, tokens: int) -> int:
        """Physical memory of a slot's caches with `tokens` tokens."""

    def trim(self, slot: int, tokens: int) -> None:
        """Frees the memory of a slot after its first `tokens`, if the system supports it.

        Later positions are not read before they are written again.
        """

    def read_slot(self, slot: int, positions: int) -> Iterator[CacheBytes]:
        """Copies keys and values of a slot's first positions to the host, piece by piece."""

    def write_slot(self, slot: int, positions: int, pieces: Sequence[CacheBytes]) -> Iterator[None]:
        """Writes the first positions of what `read_slot` copied, from this slot or another one, to
        a slot, piece by piece.

        Raises:
            ValueError: the pieces do not fit a slot.
        """

    def slot_bytes(self, positions: int) -> int:
        """Approximate size of what `read_slot` copies."""

    def fingerprint(self) -> str:
        """Hexadecimal digest of everything but tokens that keys and values depend on."""

    def resize(self, users: int, progress: Progress) -> None:
        """Reallocates the caches for another number of users; their contents are lost."""

    def recover(self) -> None:
        """Prepares for the next step after a device error; caches keep their contents."""

    def close(self) -> None:
        """Frees the graphs."""
