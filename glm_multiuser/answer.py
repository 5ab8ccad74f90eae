"""From the engine's events to what a caller sees: pieces of text, and the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.tokenizers import AnswerReader, ChatTokenizer, StopStrings, ToolCall


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities at one generated token, under the unmodified distribution.

    `top` has those of the best tokens by their ids, best first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Piece:
    """What one token, or the end, adds to an answer.

    Attributes:
        text: the text that became final; may be empty while a character is incomplete.
        token_ids: the tokens that became known.
        finish_reason: None until the last piece, then "stop", "length" or "cancelled".
        logprobs: one for each of `token_ids` when the parameters asked for them, else None.
        inside_character: whether the answer so far ends inside a character, whose rest has yet
            to come.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Optional[str] = None
    logprobs: Optional[tuple[Logprob, ...]] = None
    inside_character: bool = False


@dataclass(frozen=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: of the question with its history.
        completion_tokens: of the answer, a final stop token included.
        cached_tokens: of the prompt, those whose keys and values the user's slot still held from
            its last request; always 0 for ChatGLM-6B, whose prompts are prefilled whole.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


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
        logprobs: one per token when the parameters asked for them, else None.
        error: why, for "error".
        tool_calls: what the answer calls, where it was read by an `AnswerReader`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: Optional[tuple[Logprob, ...]] = None
    error: Optional[GLMMultiUserError] = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass
class AnswerCollector:
    """Collects one request's events; makes text of its ids, and ends it at a stop string.

    A stop string ends the answer at the token that completed it. The engine may have made a few
    more tokens by then; they are ignored, so that the result does not depend on who reads when.

    Stop strings are looked for in the content that `reader` returns, not in headers and calls,
    which a caller never sees as text.

    continued: whether the prompt ends with the beginning of the answer.
    """

    request: Request
    tokenizer: Optional[ChatTokenizer]
    reader: Optional[AnswerReader] = None
    continued: bool = False
    result: Optional[GenerationResult] = None
    _texts: list[str] = field(default_factory=list)
    _tokens: list[Token] = field(default_factory=list)
    _tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        self._detokenizer = None
        if self.tokenizer:
            self._detokenizer = self.tokenizer.detokenizer(continued=self.continued)
        self._stop_strings = StopStrings(self.request.params.stop)

    def take(self, event: Event) -> Piece:
        """Takes the next event in; the piece with a finish reason is the last one."""
        if isinstance(event, End):
            rest = self._content(self._detokenizer.flush()) if self._detokenizer else ""
            if self.reader:
                read = self.reader.finish()
                rest, self._tool_calls = rest + read.text, read.tool_calls
            text, stopped = self._stop_strings.feed(rest)
            if stopped and event.finish_reason == "length":
                event = replace(event, finish_reason="stop")
            return self._finish(text + self._stop_strings.flush(), (), event)
        self._tokens.append(event)
        token_id = event.choice.token_id
        text, stopped = "", False
        if self._detokenizer and token_id not in self.request.stop_token_ids:
            content = self._content(self._detokenizer.push([token_id]))
            text, stopped = self._stop_strings.feed(content)
        if stopped:
            if self.reader:
                self._tool_calls = self.reader.finish().tool_calls
            end = End("stop", None, self.request.queued_seconds, event.seconds)
            return self._finish(text, (event,), end)
        self._texts.append(text)
        inside = self._detokenizer is not None and self._detokenizer.inside_character
        return Piece(text, (token_id,), None, self._logprobs((event,)), inside)

    def _content(self, text: str) -> str:
        return self.reader.feed(text) if self.reader else text

    def _finish(self, text: str, tokens: tuple[Token, ...], end: End) -> Piece:
        self._texts.append(text)
        prompt_tokens = len(self.request.prompt_token_ids)
        times = tuple(token.seconds for token in self._tokens)
        first = times[0] if times else None
        self.result = GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(token.choice.token_id for token in self._tokens),
            finish_reason=end.finish_reason,
            usage=Usage(prompt_tokens, len(self._tokens), self.request.cached_tokens),
            timings=Timings(end.queued_seconds, first, end.total_seconds, times),
            logprobs=self._logprobs(self._tokens),
            error=end.error,
            tool_calls=self._tool_calls,
        )
        token_ids = tuple(token.choice.token_id for token in tokens)
        return Piece(text, token_ids, end.finish_reason, self._logprobs(tokens))

    def _logprobs(self, tokens: Sequence[Token]) -> Optional[tuple[Logprob, ...]]:
        if self.request.params.logprobs is None:
            return None
        choices = [token.choice for token in tokens]
        return tuple(
            Logprob(choice.token_id, choice.logprob, choice.top or {})
            for choice in choices
            if choice.logprob is not None
        )
