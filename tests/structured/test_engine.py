"""Structured answers of an engine: the same alone and under load, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from glm_multiuser import Grammar, InvalidParameterError, MultiUserLLM, SamplingParams
from glm_multiuser.tokenizers import ChatTokenizer, load_tokenizer
from tests.server.process import ROOT
from tests.structured.random_model import random_llm
from tests.structured.schemas import schemas
from tests.structured.walking import compiler_of

TEXT = {"type": "string", "minLength": 3, "maxLength": 8}
SCHEMA = {
    "type": "object",
    "properties": {"a": TEXT, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
METHODS = ("consume_token", "is_stopped", "compute_bitmask", "is_error", "get_error")


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    found = load_tokenizer(ROOT / "ckpt/glm-tiny")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def llm(tokenizer: ChatTokenizer) -> Iterator[MultiUserLLM]:
    with random_llm(tokenizer, users=16) as made:
        yield made


def params(schema: Any, seed: int, **wanted: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "grammar": Grammar.json_schema(schema),
            "seed": seed,
            "temperature": seed % 2,
            "max_tokens": 400,
            **wanted,
        }
    )


def test_the_same_json_alone_and_beside_others_and_cancelled_ones(
    llm: MultiUserLLM, tokenizer: ChatTokenizer
) -> None:
    wanted = [params(schema, seed) for seed, schema in enumerate(schemas(40))]
    with random_llm(tokenizer, users=1) as single:
        alone = [single.submit(f"q{at}", params=one).result() for at, one in enumerate(wanted)]
    handles = []
    for at, one in enumerate(wanted):
        handles.append(llm.submit(f"q{at}", params=one))
        cancelled = llm.submit(f"other {at}", params=one)
        next(cancelled)
        cancelled.cancel()
    for handle, expected, one in zip(handles, alone, wanted):
        result = handle.result()
        assert result.token_ids == expected.token_ids
        assert result.finish_reason == "stop"
        assert one.grammar is not None
        jsonschema.validate(json.loads(result.text), one.grammar.value)


@pytest.mark.parametrize(
    "further",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 40, "top_p": 0.9},
        {"min_p": 0.2},
        {"ignore_eos": True},
        {"min_tokens": 300},
        {"logprobs": 5},
    ],
)
def test_together_with_other_parameters(llm: MultiUserLLM, further: dict[str, Any]) -> None:
    for seed in range(4):
        result = llm.submit("q", params=params(SCHEMA, seed, **further)).result()
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), SCHEMA)


def test_log_probabilities_are_those_of_allowed_tokens(llm: MultiUserLLM) -> None:
    grammar = Grammar.choice(["aa", "bb"])
    result = llm.submit("q", params=SamplingParams(grammar=grammar, logprobs=20, seed=1)).result()
    assert result.logprobs is not None
    for one in result.logprobs:
        assert 1 <= len(one.top) <= 20
        assert np.isclose(sum(np.exp(list(one.top.values()))), 1.0)
        assert one.top[one.token_id] == one.logprob


def test_max_tokens_and_stop_strings_end_an_answer_before_its_grammar(llm: MultiUserLLM) -> None:
    result = llm.submit("q", params=params(SCHEMA, 1, max_tokens=3)).result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 3)
    result = llm.submit("q", params=params(SCHEMA, 1, stop=('"b"',))).result()
    assert result.finish_reason == "stop"
    assert result.text.startswith('{"a"')
    assert '"b"' not in result.text


def test_a_dead_end_ends_only_its_own_request(llm: MultiUserLLM, tokenizer: ChatTokenizer) -> None:
    stop = tokenizer.stop_token_ids[0]
    other = llm.submit("q", params=params(SCHEMA, 1))
    grammar = Grammar.lark(f'start: "aaaa" <[{stop}]> "b"')
    result = llm.submit("q", params=SamplingParams(grammar=grammar)).result()
    assert result.finish_reason == "error"
    assert "allows no token" in str(result.error)
    assert other.result().finish_reason == "stop"


@pytest.mark.parametrize("method", ["consume_token", "is_stopped", "compute_bitmask"])
def test_a_panic_of_llguidance_ends_only_its_own_request(llm: MultiUserLLM, method: str) -> None:
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    def panic(*arguments: object) -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    other = llm.submit("q", params=params(SCHEMA, 1))
    wanted = params(SCHEMA, 1)
    assert wanted.grammar is not None
    matcher = llm.compile_grammar(wanted.grammar)
    inner: Any = matcher._matcher
    methods = {name: getattr(inner, name) for name in METHODS}
    matcher._matcher = SimpleNamespace(**{**methods, method: panic})
    result = llm.submit("q", params=wanted, matcher=matcher).result()
    assert result.finish_reason == "error"
    assert "the grammar failed: Panic" in str(result.error)
    assert other.result().finish_reason == "stop"


def test_an_answer_that_may_end_anywhere_ends_with_a_stop_token(
    llm: MultiUserLLM, tokenizer: ChatTokenizer
) -> None:
    grammar = Grammar.regex("[ab]*")
    for seed in range(3):
        wanted = SamplingParams(grammar=grammar, min_tokens=20, max_tokens=400, seed=seed)
        result = llm.submit("q", params=wanted).result()
        assert len(result.token_ids) >= 20
        assert set(result.text) <= set("ab")
        if result.finish_reason == "stop":
            assert result.token_ids[-1] in tokenizer.stop_token_ids


@pytest.mark.parametrize("further", [{}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0}])
def test_stop_tokens_end_an_answer_early_where_its_grammar_allows_no_others(
    llm: MultiUserLLM, tokenizer: ChatTokenizer, further: dict[str, Any]
) -> None:
    table = tokenizer.token_table(tokenizer.vocab_size)
    stops = tuple(one for one, text in enumerate(table) if text and not text.strip(b"ab"))
    wanted: dict[str, Any] = {"grammar": Grammar.regex("x[ab]{8}"), "seed": 1, **further}
    params = SamplingParams(min_tokens=6, stop_token_ids=stops, logprobs=0, **wanted)
    result = llm.submit("q", params=params).result()
    assert (result.finish_reason, result.text) == ("stop", "x")
    assert result.token_ids[-1] in stops
    assert result.logprobs is not None
    assert result.logprobs[-1].logprob > -np.inf


def test_every_call_returns_the_text_of_its_grammar(
    llm: MultiUserLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " 北京,上海 "
    wanted = SamplingParams(grammar=Grammar.choice([text]))
    assert "".join(piece.text for piece in llm.stream_chat("q", params=wanted)) == text
    assert llm.chat("q", params=wanted) == (text, [("q", text)])
    assert llm.submit(llm.prompt_token_ids("q"), params=wanted).result().text == text
    monkeypatch.setattr(llm, "default_params", wanted)
    assert llm.chat("q") == (text, [("q", text)])


def test_a_matcher_of_another_model_is_rejected(
    llm: MultiUserLLM, tokenizer: ChatTokenizer
) -> None:
    wanted = params(SCHEMA, 1)
    assert wanted.grammar is not None
    matcher = compiler_of(tokenizer).compile(wanted.grammar)
    matcher.vocab_size += 1
    with pytest.raises(InvalidParameterError, match=r"matcher is for \d+ tokens; this model has"):
        llm.submit("q", params=wanted, matcher=matcher)


def test_a_matcher_of_another_request_is_rejected(llm: MultiUserLLM) -> None:
    """Each would take in the tokens of both answers."""
    wanted = params(SCHEMA, 1)
    assert wanted.grammar is not None
    matcher = llm.compile_grammar(wanted.grammar)
    first = llm.submit("q", params=wanted, matcher=matcher)
    with pytest.raises(InvalidParameterError, match="matcher is another request's"):
        llm.submit("q", params=wanted, matcher=matcher)
    alone = llm.submit("q", params=wanted).result()
    assert first.result().token_ids == alone.token_ids


def test_without_a_tokenizer_there_is_no_grammar() -> None:
    with random_llm(None) as bare, pytest.raises(InvalidParameterError, match="tokenizer"):
        bare.submit([1, 2], params=params(SCHEMA, 1))


def test_without_the_extra_the_error_names_it(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with random_llm(tokenizer) as llm, pytest.raises(InvalidParameterError) as raised:
        llm.submit("q", params=params(SCHEMA, 1))
    assert "pip install 'glm-multiuser[structured]'" in str(raised.value)
