"""Many schemas with every family's tokenizer, 16 users at a time: every answer fits its schema, and
is the one given alone, while other requests are cancelled and fail."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from glm_multiuser import Grammar, MultiUserLLM, SamplingParams
from glm_multiuser.handle import Handle
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.random_model import random_llm
from tests.structured.schema_suite import download, served, suite
from tests.structured.schemas import schemas
from tests.structured.walking import compiler_of
from tests.tokenizers.conftest import SMALL

NONE: Mapping[int, float] = MappingProxyType({})
USERS = 16
THOUSAND = 1000
FEW = 40
FEWEST_OF_SUITE = 150
"""Of its schemas llguidance supports at least so many."""


def params_of(schema: Any, seed: int, bias: Mapping[int, float]) -> SamplingParams:
    sampled: dict[str, Any] = (
        {"temperature": 1.0, "top_p": 0.95} if seed % 3 else {"temperature": 0}
    )
    grammar = Grammar.json_schema(schema)
    return SamplingParams(grammar=grammar, seed=seed, max_tokens=1000, logit_bias=bias, **sampled)


def beside_others(llm: MultiUserLLM, wanted: Sequence[SamplingParams]) -> Iterator[Any]:
    """The results in their order. Every third one has a neighbour that is cancelled at its first
    token, and every fifth one that gets NaN."""
    running: list[Handle] = []
    for number, params in enumerate(wanted):
        if len(running) == USERS:
            yield running.pop(0).result()
        running.append(llm.submit(f"question {number}", params=params))
        if number % 3 == 0:
            neighbour = llm.submit("other", params=params)
            next(neighbour)
            neighbour.cancel()
        if number % 5 == 0:
            broken = llm.submit([5, llm._runner.vocab_size - 1], params=params)
            assert broken.result().finish_reason == "error"
    for handle in running:
        yield handle.result()


def check(tokenizer: ChatTokenizer, made: Sequence[Any], bias: Mapping[int, float] = NONE) -> int:
    """-> how many answers came to their end; without a bias all have to."""
    wanted = [params_of(schema, seed, bias) for seed, schema in enumerate(made)]
    ended = 0
    with random_llm(tokenizer, users=1) as single:
        alone = [
            single.submit(f"question {number}", params=params).result()
            for number, params in enumerate(wanted)
        ]
    with random_llm(tokenizer, users=USERS) as llm:
        for schema, expected, result in zip(made, alone, beside_others(llm, wanted)):
            assert result.token_ids == expected.token_ids
            if not bias or result.finish_reason != "length":
                assert result.finish_reason == "stop", schema
                validator = jsonschema.Draft202012Validator(schema)
                validator.validate(json.loads(result.text))
                ended += 1
    return ended


def share(request: pytest.FixtureRequest, count: int) -> Sequence[Any]:
    """Of so many schemas, those for this family; together the families have them all."""
    place = SMALL.index(request.node.callspec.params["small_tokenizer"])
    return schemas(count)[place :: len(SMALL)]


def test_a_few_schemas(small_tokenizer: ChatTokenizer, request: pytest.FixtureRequest) -> None:
    check(small_tokenizer, share(request, FEW))


@pytest.mark.rare
def test_a_thousand_schemas(small_tokenizer: ChatTokenizer, request: pytest.FixtureRequest) -> None:
    check(small_tokenizer, share(request, THOUSAND))


@pytest.fixture(scope="session")
def suite_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("jsonschema"))


@pytest.mark.rare
def test_the_schema_suite(small_tokenizer: ChatTokenizer, suite_archive: Path) -> None:
    # Nothing bounds its strings, lists and objects; this makes most of them short.
    table = small_tokenizer.token_table(small_tokenizer.vocab_size)
    bias = {token_id: 20.0 for token_id, text in enumerate(table) if text in (b'"', b"]", b"}")}
    made = served(compiler_of(small_tokenizer), suite(suite_archive))
    assert len(made) >= FEWEST_OF_SUITE
    assert check(small_tokenizer, made, bias) >= 0.9 * len(made)
