"""From the engine's events to what a caller sees: pieces of text, and the whole result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Optional

from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.tokenizers import ChatTokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """What one token, or the end, adds to an answer.

    Attributes:
        text: the text that became final; may be empty while a character is incomplete.
        token_ids: the tokens that became known.
        finish_reason: None until the last piece, then "stop", "length" or "cancelled".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Optional[str] = None


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities at one generated token, under the unmodified distribution.

    Attributes:
        token_id: the token that was chosen.
        logprob: its log-probability.
        top: token id -> log-probability of the best ones, best first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Usage:
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was submitted.

    Attributes:
        queued_s: until it got its slot.
        ttft_s: until its first token (TTFT); None without one.
        total_s: until its end.
        token_times: until each token.
    """

    queued_s: float
    ttft_s: Optional[float]
    total_s: float
    token_times: tuple[float, ...]


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        text: the answer without stop tokens and stop strings; empty without a tokenizer.
        token_ids: every generated token, a final stop token included.
        finish_reason: "stop", "length", "cancelled" or "error".
        usage: counts of tokens.
        timings: when things happened.
        logprobs: one per token when the parameters asked for them, else None.
        error: why, for "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: Optional[tuple[Logprob, ...]] = None
    error: Optional[GLMMultiUserError] = None


@dataclass
class Answer:
    """Collects one request's events; makes text of its ids, and ends it at a stop string.

    A stop string ends the answer at the token that completed it. The engine may have made a few
    more tokens by then; they are ignored, so that the result does not depend on who reads when.
    """

    request: Request
    tokenizer: Optional[ChatTokenizer]
    result: Optional[GenerationResult] = None
    _texts: list[str] = field(default_factory=list)
    _tokens: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
        self._stop_strings = StopStrings(self.request.params.stop)

    def take(self, event: Event) -> Piece:
        """Takes the next event in; the piece with a finish reason is the last one."""
        if isinstance(event, End):
            rest = self._detokenizer.flush() if self._detokenizer else ""
            text, stopped = self._stop_strings.feed(rest)
            if stopped and event.finish_reason == "length":
                event = replace(event, finish_reason="stop")
            return self._finish(text + self._stop_strings.flush(), (), event)
        self._tokens.append(event)
        token_id = event.choice.token_id
        text, stopped = "", False
        if self._detokenizer and token_id not in self.request.stop_token_ids:
            text, stopped = self._stop_strings.feed(self._detokenizer.push([token_id]))
        if stopped:
            end = End("stop", None, self.request.queued_seconds, event.seconds)
            return self._finish(text, (token_id,), end)
        self._texts.append(text)
        return Piece(text, (token_id,))

    def _finish(self, text: str, token_ids: tuple[int, ...], end: End) -> Piece:
        self._texts.append(text)
        times = tuple(token.seconds for token in self._tokens)
        self.result = GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(token.choice.token_id for token in self._tokens),
            finish_reason=end.finish_reason,
            usage=Usage(len(self.request.prompt_token_ids), len(self._tokens)),
            timings=Timings(
                end.queued_seconds, times[0] if times else None, end.total_seconds, times
            ),
            logprobs=self._logprobs(),
            error=end.error,
        )
        return Piece(text, token_ids, end.finish_reason)

    def _logprobs(self) -> Optional[tuple[Logprob, ...]]:
        if self.request.params.logprobs is None:
            return None
        choices = [token.choice for token in self._tokens]
        return tuple(
            Logprob(choice.token_id, choice.logprob, choice.top or {})
            for choice in choices
            if choice.logprob is not None
        )
