"""One request and its life."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.sampling import Choice, RowSampler, TokenMatcher
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.sessions.identity import Identity

logger = logging.getLogger(__name__)

_numbers = itertools.count()


@dataclass(frozen=True)
class Token:
    """One generated token, handed out as soon as it exists.

    Attributes:
        choice: the token id and, where asked for, its log-probability and the best ones.
        seconds: since the request was submitted.
    """

    choice: Choice
    seconds: float


@dataclass(frozen=True)
class End:
    """The last thing that a request hands out.

    Attributes:
        finish_reason: "stop", "length", "cancelled" or "error".
        error: why, for "error".
        queued_seconds: from submission to its slot.
        total_seconds: from submission to this end.
    """

    finish_reason: str
    error: Optional[GLMMultiUserError]
    queued_seconds: float
    total_seconds: float


Event = Union[Token, End]


class AnonymousUser:
    """The user of a request that names none: equal to no other, and no slot is kept for it."""


@dataclass(frozen=True)
class OwnedUser:
    """A user of an owner; users of two owners are two, whatever their names."""

    owner: bytes = field(repr=False)
    user: Hashable


def holder_of(user: Hashable, owner: bytes) -> Hashable:
    """Who holds a slot: a user of this owner, b"" for none."""
    return OwnedUser(owner, user) if owner else user


def user_of(holder: Hashable) -> Hashable:
    """The name that a holder of a slot was given by its owner."""
    return holder.user if isinstance(holder, OwnedUser) else holder


class Request:
    """What the engine knows about one request.

    Args:
        prompt_token_ids: at least one.
        params: already validated.
        user: whose slot it needs; requests of one user of an owner run one after the other.
        stop_token_ids: the model's own; ignored with `ignore_eos`.
        limit: the most tokens that the sequence length leaves room for.
        vocab_size: of the model.
        deliver: takes each event; called on the device thread, so it must not block. If it
            raises, the request is cancelled.
        group: groups share queue and slots fairly.
        owner: what only the tenant has whose user this is; b"" for none.
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
        """The tokens of the prompt from the second one on, as far as it is in, where they are
        wanted."""
        self.saved_past: Optional[Any] = None
        self.cached_tokens = 0
        """Of the prompt, those whose keys and values its slot still held."""
        self.computed_tokens = 0
        """Of prompt and answer, those whose keys and values its slot holds."""
        self.kept_tokens = 0
        """Those of the user's last request whose memory the prompt takes over."""
        self.overtaken = 0
        """By requests that there was memory for, when there was not enough for this one."""
        self.forgotten = False
        """Whether nothing is kept of its user when it has ended."""
        self._deliver = deliver
        self.cancelled = False
        self._submitted = time.monotonic()
        self.queued_seconds = 0.0
        """From submission to the slot; 0 until then."""

    def __len__(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def longest(self) -> int:
        """The most tokens that it may come to, prompt and answer."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def resident_tokens(self) -> int:
        """How many tokens its slot has memory for."""
        return max(self.computed_tokens, self.kept_tokens)

    @property
    def prompt_is_in(self) -> bool:
        """Whether its slot holds the whole prompt."""
        return self.computed_tokens >= len(self.prompt_token_ids)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens `start` to `stop` of prompt and answer, not more than there are."""
        prompt, answer = self.prompt_token_ids, self.output_token_ids
        first = max(0, start - len(prompt))
        return (*prompt[start:stop], *answer[first : max(0, stop - len(prompt))])

    def held_token_ids(self) -> tuple[int, ...]:
        """The tokens whose keys and values its slot holds."""
        return self.token_ids(0, self.computed_tokens)

    def common(self, token_ids: Sequence[int]) -> int:
        """How many tokens its prompt begins with that are the same in both.

        At least the last one of the prompt is computed again: the answer begins with its logits.
        """
        longest = min(len(token_ids), len(self.prompt_token_ids) - 1)
        pairs = enumerate(zip(token_ids[:longest], self.prompt_token_ids))
        return next((place for place, (old, new) in pairs if old != new), longest)

    def reuse(self, held: Sequence[int]) -> None:
        """Skips what its prompt has in common with the tokens that its slot holds."""
        self.cached_tokens = self.computed_tokens = self.common(held)

    def cancel(self) -> None:
        """May be called at any moment from any thread, also by a signal handler or a finalizer in
        the middle of this very call; the engine notices at its next step."""
        self.cancelled = True

    def enter(self) -> None:
        """The request got its slot."""
        if not self.queued_seconds:
            self.queued_seconds = self._elapsed()

    def accept(self, choice: Choice) -> Optional[str]:
        """Takes the next token in and hands it out; returns the finish reason if it is the last."""
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
            if not self.cancelled:  # otherwise nobody reads it any more
                logger.exception("request %d is cancelled: its receiver failed", self.number)
            self.cancel()

    def _elapsed(self) -> float:
        return time.monotonic() - self._submitted
