"""The tokens that a grammar allows next, as a mask of the vocabulary.

The mask depends only on the grammar and the request's own tokens. A separate thread computes it as
soon as the last token is known, while the device runs the next step.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.errors import GenerationError
from glm_multiuser.sampling_rows import Mask
from glm_multiuser.worker_threads import run_on

logger = logging.getLogger(__name__)

MASK_THREADS = 2


class LLMatcher(Protocol):
    """The methods in use of llguidance's class of this name."""

    def consume_token(self, token: int) -> bool: ...
    def is_stopped(self) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class GrammarMatcher:
    """The state of one answer in its grammar.

    Args:
        matcher: of llguidance.
        vocab_size: of the model.
        stop_token_ids: allowed where the grammar may end.
        never: other ids, which are never allowed.

    Attributes:
        taken: whether a request already uses it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_token_ids: NDArray[np.intp],
        never: NDArray[np.intp],
    ) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.taken = False
        self._stops = stop_token_ids
        self._never = never
        self._mask: Future[Mask] = Future()
        self.complete = False
        self._compute()

    def accept(self, token_id: int) -> None:
        """Advances by one token, and starts to compute the mask after it."""
        if token_id in self._stops:
            self.complete = True
            return
        self._mask.exception()  # waits, because the matcher is not thread-safe
        try:
            accepted = self._matcher.consume_token(token_id)
            self.complete = accepted and self._matcher.is_stopped()
        except BaseException as error:
            self._mask = Future()
            self._failed(error)
            return
        if not self.complete:
            self._mask = Future()
            run_on(_threads(), self._compute)

    def allowed(self) -> Mask:
        """Waits for the mask of allowed next tokens, [vocab_size].

        Raises:
            GenerationError: no token is allowed, or llguidance failed.
        """
        return self._mask.result()

    def _compute(self) -> None:
        try:
            self._mask.set_result(self._next_mask())
        except GenerationError as error:
            self._mask.set_exception(error)
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Makes `allowed` raise; a panic of llguidance's Rust code is not an Exception."""
        logger.error("llguidance failed", exc_info=error)
        self._mask.set_exception(GenerationError(f"the grammar failed: {error!r}"))

    def _next_mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GenerationError(f"the grammar: {_shortened(self._matcher.get_error())}")
        # The last token stands for the end of the answer; the model does not have it.
        mask: Mask = np.unpackbits(bits, count=self.vocab_size + 1, bitorder="little").view(bool)
        may_end, mask = bool(mask[-1]), mask[:-1]
        mask[self._never] = False
        mask[self._stops] = may_end
        if not mask.any():
            raise GenerationError("the grammar allows no token of this vocabulary next")
        return mask


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MASK_THREADS, "grammar")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "..."
