"""Compiles grammars of answers with llguidance, for one tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.errors import GenerationError, InvalidParameterError, shown
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.structured.json_schema import for_llguidance
from glm_multiuser.structured.lark import as_lark
from glm_multiuser.structured.matcher import GrammarMatcher, LLMatcher
from glm_multiuser.structured.vocabulary import Vocabulary
from glm_multiuser.tokenizers import ChatTokenizer
from glm_multiuser.tokenizers.forms import one_of
from glm_multiuser.worker_threads import on_large_stack

INSTALL = "pip install 'glm-multiuser[structured]'"

LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 5_000,
    "max_lexer_states": 100_000,
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
        self._library = library()
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        # A tokenizer may have more tokens than the model.
        stops = sorted(one for one in stop_token_ids if one < vocab_size)
        self.stop_token_ids = np.array(stops, np.intp)
        self._lock = threading.Lock()

    @cached_property
    def _tokens(self) -> object:
        tokens = Vocabulary(self._tokenizer, self.vocab_size)
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


def library() -> ModuleType:
    """Imports llguidance.

    Raises:
        InvalidParameterError: it is not installed.
    """
    try:
        return import_module("llguidance")
    except ImportError:
        raise InvalidParameterError(
            f"grammar needs the package llguidance, which is not installed: {INSTALL}", "grammar"
        ) from None


def _lark(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "lark_grammar": text}


def _schema(name: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "json_schema": for_llguidance(schema)}
