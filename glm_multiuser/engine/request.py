"""A request and its life cycle."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional, Union

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.sampling import Choice, RowSampler, TokenMatcher
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.session import CacheBytes

logger = logging.getLogger(__name__)

_numbers = itertools.count()


@dataclass(frozen=True)
class Token:
    """One generated token, delivered immediately.

    Attributes:
        choice: the token id and, if requested, its log-probability and the top ones.
        seconds: since the request was submitted.
    """

    choice: Choice
    seconds: float


@dataclass(frozen=True)
class End:
    """The last event of a request.

    Attributes:
        finish_reason: "stop", "length", "cancelled" or "error".
        error: set if finish_reason is "error".
        queued_seconds: from submission until it got a slot.
        total_seconds: from submission until it ended.
    """

    finish_reason: str
    error: Optional[GLMMultiUserError]
    queued_seconds: float
    total_seconds: float


Event = Union[Token, End]


class AnonymousUser:
    """The user of a request that names none: equal to no other user, and keeps no slot."""


@dataclass(frozen=True)
class OwnedUser:
    """A user of an owner; users of different owners are different, even with the same name."""

    owner: bytes = field(repr=False)
    user: Hashable


def holder_of(user: Hashable, owner: bytes) -> Hashable:
    """The holder of a slot: a user of this owner, b"" for none."""
    return OwnedUser(owner, user) if owner else user


def user_of(holder: Hashable) -> Hashable:
    """The user, without its owner."""
    return holder.user if isinstance(holder, OwnedUser) else holder


class Request:
    """What the engine knows about one request.

    Args:
        prompt_token_ids: at least one.
        params: already validated.
        user: requests of one user of an owner run one after the other, in that user's slot.
        stop_token_ids: the model's own; ignored with `ignore_eos`.
        limit: maximum of new tokens within the sequence length.
        vocab_size: of the model.
        deliver: called with each event on the device thread, so it must not block. If it raises,
            the request is cancelled.
        group: groups share queue and slots fairly.
        owner: identifies the user's tenant, and is known to that tenant only; b"" for none.
        matcher: of params.grammar.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        user: Hashable,
        stop_token_ids: Sequence[int],
        limit: int,
        vocab_size: int,
        deliver: Callable[[Event], None],
        group: str = "",
        owner: bytes = b"",
        matcher: Optional[TokenMatcher] = None,
    ) -> None:
        self.number = next(_numbers)
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.user = user
        self.group = group
        self.owner = owner
        self.holder = holder_of(user, owner)
        self.identity: Optional[Identity] = None
        """Of its session, once an engine has accepted it; None for an anonymous user."""
        self.max_tokens = min(limit, params.max_tokens or limit)
        model_stops = () if params.ignore_eos else tuple(stop_token_ids)
        self.stop_token_ids = frozenset(model_stops + params.stop_token_ids)
        self.sampler = RowSampler(params, self.prompt_token_ids, model_stops, vocab_size, matcher)
        self.output_token_ids: list[int] = []
        self.prompt_logprobs: list[Choice] = []
        """Of the prompt's tokens from the second on, as far as it is prefilled; if requested."""
        self.saved_past: Optional[Sequence[CacheBytes]] = None
        """Keys and values of its computed tokens, while a resize pauses it."""
        self.cached_tokens = 0
        """Length of the prompt's cached prefix."""
        self.computed_tokens = 0
        """Tokens of prompt and answer whose keys and values are in its slot."""
        self.kept_tokens = 0
        """Tokens of the user's last request whose memory the prompt reuses."""
        self.overtaken = 0
        """Number of requests that passed it, because there was memory for them but not for it."""
        self.forgotten = False
        """Whether its user's slot is freed when it ends."""
        self._deliver = deliver
        self.cancelled = False
        self._submitted = time.monotonic()
        self.queued_seconds = 0.0
        """From submission until it got a slot; 0 before."""

    def __len__(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def longest(self) -> int:
        """Maximum of tokens, prompt and answer."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def resident_tokens(self) -> int:
        """Number of tokens for which its slot has allocated memory."""
        return max(self.computed_tokens, self.kept_tokens)

    @property
    def prompt_is_in(self) -> bool:
        """Whether the whole prompt is prefilled."""
        return self.computed_tokens >= len(self.prompt_token_ids)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens `start` to `stop - 1` of prompt and answer, as far as they exist."""
        prompt, answer = self.prompt_token_ids, self.output_token_ids
        first = max(0, start - len(prompt))
        return (*prompt[start:stop], *answer[first : max(0, stop - len(prompt))])

    def held_token_ids(self) -> tuple[int, ...]:
        """The tokens whose keys and values are in its slot."""
        return self.token_ids(0, self.computed_tokens)

    def common(self, token_ids: Sequence[int]) -> int:
        """Length of the common prefix of `token_ids` and the prompt.

        Excludes the prompt's last token, which must be computed for its logits.
        """
        longest = min(len(token_ids), len(self.prompt_token_ids) - 1)
        pairs = enumerate(zip(token_ids[:longest], self.prompt_token_ids))
        return next((place for place, (old, new) in pairs if old != new), longest)

    def reuse(self, held: Sequence[int]) -> None:
        """Skips the common prefix of the prompt and the tokens in its slot."""
        self.cached_tokens = self.computed_tokens = self.common(held)

    def cancel(self) -> None:
        """Takes effect in the engine's next step. May be called from any thread, and reentrantly,
        by signal handlers or finalizers."""
        self.cancelled = True

    def enter(self) -> None:
        """Records that the request got a slot."""
        if not self.queued_seconds:
            self.queued_seconds = self._elapsed()

    def accept(self, choice: Choice) -> Optional[str]:
        """Appends and delivers the next token; returns the finish reason if it is the last."""
        self.sampler.accept(choice.token_id)
        self.output_token_ids.append(choice.token_id)
        self._hand_over(Token(choice, self._elapsed()))
        if choice.token_id in self.stop_token_ids or self.sampler.complete:
            return "stop"
        if len(self.output_token_ids) >= self.max_tokens:
            return "length"
        return None

    def end(self, finish_reason: str, error: Optional[GLMMultiUserError] = None) -> None:
        elapsed = self._elapsed()
        self._hand_over(End(finish_reason, error, self.queued_seconds or elapsed, elapsed))

    def _hand_over(self, event: Event) -> None:
        try:
            self._deliver(event)
        except Exception:
            if not self.cancelled:  # otherwise its reader is expected to be gone
                logger.exception("request %d is cancelled: its receiver failed", self.number)
            self.cancel()

    def _elapsed(self) -> float:
        return time.monotonic() - self._submitted
