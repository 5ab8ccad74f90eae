"""Turns the engine's events into streamed pieces of text and the final result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.sampling import Choice
from glm_multiuser.tokenizers import (
    AnswerReader,
    ChatTokenizer,
    ContentReader,
    StopStrings,
    ToolCall,
)


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities at one generated or prompt token, under the model's own
    distribution; with a grammar, over the tokens that it allows.

    `top` maps the ids of the best tokens to their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


PromptLogprobs = tuple[Optional[Logprob], ...]
"""One per prompt token; None for the first one, which has no context."""


@dataclass(frozen=True)
class CallDelta:
    """What a piece adds to a tool call.

    Attributes:
        index: of the call in its answer.
        name: of the function, in the first delta of the call; "" in the others.
        arguments: text to append to the arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """What one token, or the end, adds to an answer.

    Attributes:
        text: new final text; may be empty while a character is incomplete.
        token_ids: the new tokens.
        finish_reason: None until the last piece, then "stop", "length" or "cancelled".
        logprobs: one for each of `token_ids` if the parameters ask for them, else None.
        inside_character: whether the answer so far ends inside an incomplete character.
        calls: deltas of tool calls. With a grammar of tools they are streamed; otherwise the last
            piece has each call whole, because until then it may turn out to be text.
        prompt_logprobs: in the piece of the first token, those of the result.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Optional[str] = None
    logprobs: Optional[tuple[Logprob, ...]] = None
    inside_character: bool = False
    calls: tuple[CallDelta, ...] = ()
    prompt_logprobs: Optional[PromptLogprobs] = None


@dataclass(frozen=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: of the question with its history.
        completion_tokens: of the answer, a final stop token included.
        cached_tokens: prompt tokens that were in the user's prefix cache; always 0 for ChatGLM-6B,
            whose prompts are prefilled whole.
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
        logprobs: one per token if the parameters ask for them, else None.
        error: the cause of "error".
        tool_calls: of the answer, if it was read by an `AnswerReader`.
        stop_string: the stop string that ended the answer; None: none did.
        prompt_logprobs: one per prompt token if the parameters ask for them, with None for the
            first one; otherwise, and if no token was generated, None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: Optional[tuple[Logprob, ...]] = None
    error: Optional[GLMMultiUserError] = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: Optional[str] = None
    prompt_logprobs: Optional[PromptLogprobs] = None


class CallDeltas:
    """Tracks how much of an answer's tool calls was streamed."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def of(self, calls: Sequence[ToolCall]) -> tuple[CallDelta, ...]:
        """Returns what is new in the calls so far; the arguments of the last one may grow."""
        deltas = []
        for index, call in enumerate(calls):
            is_new = index == len(self._lengths)
            if is_new:
                self._lengths.append(0)
            rest = call.arguments[self._lengths[index] :]
            if is_new or rest:
                deltas.append(CallDelta(index, call.name if is_new else "", rest))
                self._lengths[index] += len(rest)
        return tuple(deltas)


@dataclass
class AnswerCollector:
    """Collects one request's events, detokenizes them, and ends the answer at a stop string.

    A stop string ends the answer at the token that completes it. The engine may have generated a
    few more tokens by then; they are ignored, so that the result does not depend on timing.

    Stop strings are searched in the content that `reader` returns, not in headers and calls, which
    the caller never sees as text.

    With a grammar of content, nothing in the answer is parsed as a call, whatever the `reader`.

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
    _prompt_logprobs: Optional[PromptLogprobs] = None

    def __post_init__(self) -> None:
        grammar = self.request.params.grammar
        self._calls = CallDeltas()
        self._calls_are_certain = grammar is not None and not grammar.is_content
        self._detokenizer = None
        if self.tokenizer and self.reader and grammar and grammar.is_content:
            self.reader = ContentReader(self.tokenizer.content_header(continued=self.continued))
        if self.tokenizer:
            exact = grammar is not None
            self._detokenizer = self.tokenizer.detokenizer(continued=self.continued, exact=exact)
        self._stop_strings = StopStrings(self.request.params.stop)

    @property
    def usage(self) -> Usage:
        """Token counts so far; `cached_tokens` is known from the first token on."""
        prompt_tokens = len(self.request.prompt_token_ids)
        return Usage(prompt_tokens, len(self._tokens), self.request.cached_tokens)

    def take(self, event: Event) -> Piece:
        """Processes the next event; the piece with a finish reason is the last one."""
        wanted = self.request.params.prompt_logprobs is not None
        if wanted and self._prompt_logprobs is None and isinstance(event, Token):
            # The prompt was complete before the first token.
            self._prompt_logprobs = (None, *_logprobs_of(self.request.prompt_logprobs))
            return replace(self._take(event), prompt_logprobs=self._prompt_logprobs)
        return self._take(event)

    def _take(self, event: Event) -> Piece:
        if isinstance(event, End):
            rest = self._content(self._detokenizer.flush()) if self._detokenizer else ""
            if self.reader:
                text, self._tool_calls = self._read_end(self.reader)
                rest += text
            text, stopped = self._stop_strings.feed(rest, ends=self._may_stop)
            if stopped and event.finish_reason == "length":
                event = replace(event, finish_reason="stop")
            return self._finish(text + self._stop_strings.flush(), (), event)
        self._tokens.append(event)
        token_id = event.choice.token_id
        text, stopped = "", False
        if self._detokenizer and token_id not in self.request.stop_token_ids:
            content = self._content(self._detokenizer.push([token_id]), token_id)
            text, stopped = self._stop_strings.feed(content, ends=self._may_stop)
        if stopped:
            if self.reader:
                self._tool_calls = self.reader.finish().tool_calls
            end = End("stop", None, self.request.queued_seconds, event.seconds)
            return self._finish(text, (event,), end)
        self._texts.append(text)
        inside = self._detokenizer is not None and self._detokenizer.inside_character
        calls: tuple[CallDelta, ...] = ()
        if self.reader and self._calls_are_certain:
            begun = self.reader.begun_call
            calls = self._calls.of([*self.reader.ended_calls, *([begun] if begun else [])])
        return Piece(text, (token_id,), None, self._logprobs((event,)), inside, calls)

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string may end the answer at the last token."""
        return len(self._tokens) > self.request.params.min_tokens

    def _read_end(self, reader: AnswerReader) -> tuple[str, tuple[ToolCall, ...]]:
        """Returns the rest of the content, and all calls; a certain one may be cut off."""
        begun = reader.begun_call if self._calls_are_certain else None
        before = len(reader.ended_calls)
        read = reader.finish()
        if begun is not None and len(read.tool_calls) == before:
            return "", (*read.tool_calls, begun)
        return read.text, read.tool_calls

    def _content(self, text: str, token_id: Optional[int] = None) -> str:
        """Returns the content in `text`, which `token_id`, or the end, made final."""
        if self.reader is None or self.tokenizer is None:
            return text
        name = self.tokenizer.separator
        if token_id is None or token_id != self.tokenizer.separator_id:
            return self.reader.take_text(text)
        before = self.reader.take_text(text.removesuffix(name))
        return before + self.reader.take_separator(name)

    def _finish(self, text: str, tokens: tuple[Token, ...], end: End) -> Piece:
        self._texts.append(text)
        times = tuple(token.seconds for token in self._tokens)
        first = times[0] if times else None
        self.result = GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(token.choice.token_id for token in self._tokens),
            finish_reason=end.finish_reason,
            usage=self.usage,
            timings=Timings(end.queued_seconds, first, end.total_seconds, times),
            logprobs=self._logprobs(self._tokens),
            error=end.error,
            tool_calls=self._tool_calls,
            stop_string=self._stop_strings.found,
            prompt_logprobs=self._prompt_logprobs,
        )
        token_ids = tuple(token.choice.token_id for token in tokens)
        calls = self._calls.of(self._tool_calls)
        return Piece(text, token_ids, end.finish_reason, self._logprobs(tokens), calls=calls)

    def _logprobs(self, tokens: Sequence[Token]) -> Optional[tuple[Logprob, ...]]:
        if self.request.params.logprobs is None:
            return None
        return tuple(_logprobs_of(token.choice for token in tokens))


def _logprobs_of(choices: Iterable[Choice]) -> Iterator[Logprob]:
    for choice in choices:
        if choice.logprob is not None:
            yield Logprob(choice.token_id, choice.logprob, choice.top or {})
