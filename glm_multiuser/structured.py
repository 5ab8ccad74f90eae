"""Structured output: compiles grammars with llguidance, and computes masks of allowed tokens.

A `GrammarCompiler` belongs to a tokenizer, a `GrammarMatcher` to one request. The mask of the next
token depends only on the grammar and the request's own tokens. A separate thread computes it as
soon as the last token is known, while the device runs the next step.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, Union

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.errors import GenerationError, InvalidParameterError, shown
from glm_multiuser.grammar import Grammar
from glm_multiuser.grammar_syntax import as_lark
from glm_multiuser.json_schema import for_llguidance
from glm_multiuser.sampling_rows import Mask
from glm_multiuser.tokenizers import ChatTokenizer
from glm_multiuser.tokenizers.forms import one_of
from glm_multiuser.worker_threads import on_large_stack, run_on

logger = logging.getLogger(__name__)

INSTALL = "pip install 'glm-multiuser[structured]'"
MASK_THREADS = 2

LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance, in work instead of time, so that answers do not depend on the machine."""


TEXT_BYTES = (*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of printable ASCII, and of UTF-8 for the first two planes of Unicode. Some others are
missing in vocabularies of published models."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; may be larger than the tokenizer's.
        stop_token_ids: that end an answer.

    Raises:
        InvalidParameterError: llguidance is not installed.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._library = _library()
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        # A tokenizer may have more tokens than the model.
        stops = sorted(one for one in stop_token_ids if one < vocab_size)
        self.stop_token_ids = np.array(stops, np.intp)
        self._lock = threading.Lock()

    @cached_property
    def _tokens(self) -> object:
        tokens = _Tokens(self._tokenizer, self.vocab_size)
        missing = [byte for byte in TEXT_BYTES if bytes([byte]) not in tokens.ids]
        if missing:
            raise InvalidParameterError(
                f"grammar needs a tokenizer with a token for every byte of text; this one has "
                f"none for {len(missing)} of them, such as {bytes(missing[:1])!r}",
                "grammar",
            )
        return self._library.LLTokenizer(tokens)

    def compile(
        self, grammar: Grammar, *, continued: bool = False, raw: bool = False
    ) -> GrammarMatcher:
        """Creates the matcher of a new request; takes milliseconds.

        Grammars are compiled for every answer, because copies of an llguidance matcher share its
        lexer: the states of one answer would count towards `max_lexer_states` of the others.

        Args:
            grammar: of the answer.
            continued: whether the beginning of the answer is in the prompt.
            raw: whether the answer is the model's raw output, without an `answer_reader`.

        Raises:
            InvalidParameterError: an unsupported or too large grammar.
        """
        # One at a time, so that a slow grammar delays only other structured requests.
        with self._lock:
            return on_large_stack(partial(self._compile, grammar, continued, raw))

    def _compile(self, grammar: Grammar, continued: bool, raw: bool) -> GrammarMatcher:
        matcher = self._matcher(self._written(grammar, continued, raw))
        never = self._special_ids
        if grammar.kind == "tool_call":
            never = np.setdiff1d(never, self._call_ids)
        made = GrammarMatcher(matcher, self.vocab_size, self.stop_token_ids, never)
        try:
            made.allowed()
        except GenerationError as error:
            raise InvalidParameterError(
                f"grammar of kind {grammar.kind} cannot be served: "
                f"{self._rejected_function(grammar)}{error}",
                "grammar",
            ) from None
        return made

    def _matcher(self, grammars: list[dict[str, Any]]) -> LLMatcher:
        written = json.dumps({"grammars": grammars})
        limits = self._library.LLParserLimits(**LIMITS)
        matcher: LLMatcher = self._library.LLMatcher(
            self._tokens, written, log_level=0, limits=limits
        )
        return matcher

    def _rejected_function(self, grammar: Grammar) -> str:
        """Returns the beginning of an error: which function has parameters that are rejected."""
        for function in grammar.value["functions"] if grammar.kind == "tool_call" else ():
            if self._matcher([_schema("parameters", function["parameters"])]).is_error():
                return f"parameters of function {shown(function['name'])}: "
        return ""

    @cached_property
    def _special_ids(self) -> NDArray[np.intp]:
        ids = {one for one in self._tokenizer.special_ids if one < self.vocab_size}
        return np.array(sorted(ids.union(self.stop_token_ids.tolist())), np.intp)

    @cached_property
    def _call_ids(self) -> NDArray[np.intp]:
        """Special tokens of tool calls."""
        return np.array(sorted(self._tokenizer.call_token_ids), np.intp)

    def _written(self, grammar: Grammar, continued: bool, raw: bool) -> list[dict[str, Any]]:
        """Returns llguidance's grammars of the whole answer and of its parts."""
        tokenizer = self._tokenizer
        if grammar.kind != "tool_call":
            rule = tokenizer.content_rule("@content", continued=continued, raw=raw)
            return [_lark("answer", f"start: {rule}"), self._part("content", grammar)]
        wanted = grammar.value
        functions = wanted["functions"]
        parts = [
            _schema(f"arguments_{place}", function["parameters"])
            for place, function in enumerate(functions)
        ]
        calls = [
            tokenizer.call_rule(function["name"], f"@arguments_{place}")
            for place, function in enumerate(functions)
        ]
        if wanted["required"]:
            return [_lark("answer", f"start: {one_of(calls)}"), *parts]
        content = None
        if wanted["content"] is not None:
            content = "@content"
            parts.append(_schema(content[1:], wanted["content"]))
        return [_lark("answer", f"start: {tokenizer.calls_rule(calls, content)}"), *parts]

    def _part(self, name: str, grammar: Grammar) -> dict[str, Any]:
        if grammar.kind == "json_schema":
            return _schema(name, grammar.value)
        if grammar.kind == "regex":
            # \d and \w are ASCII, as in JSON Schema.
            pattern = self._library.regex_to_lark(grammar.text, "dw")
            return _lark(name, f"start: /{pattern}/")
        if grammar.kind == "choice":
            return _lark(name, f"start: {one_of([json.dumps(text) for text in grammar.value])}")
        return _lark(name, as_lark(grammar.text))


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


class _Tokens:
    """A vocabulary in llguidance's format, with one more token for the end of an answer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        self.tokens = [*tokenizer.token_table(vocab_size), b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [
            vocab_size,
            *(one for one in tokenizer.special_ids if one < vocab_size),
        ]
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.tokens))

    @cached_property
    def ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        ordinary = [at for at in range(len(self.tokens)) if at not in special]
        return {self.tokens[at]: at for at in reversed(ordinary)}

    def __call__(self, written: Union[str, bytes]) -> list[int]:
        """Returns the tokenizer's ids if they are exactly this text, else the longest matches."""
        content = written.encode("utf-8") if isinstance(written, str) else bytes(written)
        ids = self._tokenizer.encode_inside(content.decode("utf-8"))
        if b"".join(self.tokens[one] for one in ids) == content:
            return ids
        ids = []
        while content:
            lengths = range(min(self._longest, len(content)), 0, -1)
            length = next((one for one in lengths if content[:one] in self.ids), 0)
            if not length:
                raise ValueError(f"the vocabulary has no token for {content[:1]!r}")
            ids.append(self.ids[content[:length]])
            content = content[length:]
        return ids


def _library() -> ModuleType:
    try:
        return import_module("llguidance")
    except ImportError:
        raise InvalidParameterError(
            f"grammar needs the package llguidance, which is not installed: {INSTALL}", "grammar"
        ) from None


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MASK_THREADS, "grammar")


def _lark(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "lark_grammar": text}


def _schema(name: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "json_schema": for_llguidance(schema)}


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "..."
