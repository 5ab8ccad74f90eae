"""A real model out of a GGUF file: SmolLM2-135M-Instruct, against transformers and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from glm_multiuser import EngineConfig, MultiUserLLM, SamplingParams, backend_choice
from glm_multiuser.backends.native.weight_types import types_in_groups
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.tokenizers import HuggingFaceTokenizer, load_tokenizer
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.gguf import read_gguf_tokenizer
from glm_multiuser.weights import load_weights
from tests.golden_data import golden_folder
from tests.models.native_driver import NativeDriver
from tests.server.process import ROOT

FILE = ROOT / "ckpt" / "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there: make smollm2"),
]

USERS = 6
SEQ_LENGTH = 640
TOLERANCE = 5e-4
READERS = 10
"""Of the text whose perplexity is known."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def read_json(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((golden_folder("smollm2") / name).read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return read_json("expected.json")


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(golden_folder("smollm2") / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.rare), None])
def llm(request: pytest.FixtureRequest) -> Iterator[MultiUserLLM]:
    """With weights widened when they are loaded, and as they are stored."""
    settings = {"users": USERS, "seq_length": SEQ_LENGTH, "weight_dtype": request.param}
    with MultiUserLLM.from_pretrained(FILE, **settings) as llm:
        yield llm


def test_alone_and_six_users_at_once(llm: MultiUserLLM, expected: dict[str, Any]) -> None:
    cases = expected["cases"]
    assert len(cases) == USERS
    prompts = [llm.chat_token_ids(case["messages"]) for case in cases]
    assert [list(one) for one in prompts] == [case["input_ids"] for case in cases]
    answers = [case["greedy"] for case in cases]
    alone = [llm.submit(one, user="alone", params=GREEDY).result() for one in prompts]
    assert [list(one.token_ids) for one in alone] == answers
    handles = [llm.submit(one, user=user, params=GREEDY) for user, one in enumerate(prompts)]
    assert [list(one.result().token_ids) for one in handles] == answers


def test_answers_end_where_the_model_ends_them(llm: MultiUserLLM, expected: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    cases = expected["cases"]
    handles = [llm.submit(case["input_ids"], params=params) for case in cases]
    for case, handle in zip(cases, handles):
        result = handle.result()
        assert result.text == case["text"]
        assert result.finish_reason == ("stop" if case["eos_in_greedy"] else "length")


def losses(driver: NativeDriver, text: dict[str, Any]) -> np.ndarray:
    """-> of each token but the first its negative log-likelihood, [tokens - 1]."""
    tokenizer = load_tokenizer(FILE)
    assert tokenizer is not None
    token_ids = tokenizer.encode(text["text"])
    assert token_ids == text["input_ids"]
    # Ten users read the text, each from another place on.
    begins = {slot: 1 + 57 * slot for slot in range(READERS)}
    requests = {slot: driver.request(token_ids[:begin]) for slot, begin in begins.items()}
    nll = np.full(len(token_ids) - 1, np.nan)
    while np.isnan(nll).any():
        for slot, logits in driver.step(requests).items():
            request = requests[slot]
            place = begins[slot] + len(request.output_token_ids) - 1
            if place < len(token_ids):
                request.output_token_ids[-1] = token_ids[place]
                scores = logits.astype(np.float64) - logits.max()
                nll[place - 1] = np.log(np.exp(scores).sum()) - scores[token_ids[place]]
    return nll


def test_logits_and_perplexity(expected: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    driver = NativeDriver.of_folder(FILE, READERS, SEQ_LENGTH, chunk=256)
    for case in expected["cases"]:
        (logits,) = driver.answer(0, driver.request(case["input_ids"]), 1)
        np.testing.assert_allclose(
            logits, arrays[f"{case['index']}/last_logits"], rtol=0, atol=TOLERANCE
        )
    nll = losses(driver, expected["perplexity"])
    np.testing.assert_allclose(nll, arrays["perplexity/nll_per_token"], rtol=0, atol=TOLERANCE)
    assert abs(np.exp(nll.mean()) - expected["perplexity"]["perplexity"]) < 1e-3


@pytest.mark.rare
@pytest.mark.parametrize(
    ("weight", "inputs", "bound"),
    [
        ("float16", "float32", 0.001),
        ("bfloat16", "float32", 0.01),
        ("int8", "bfloat16", 0.03),
        ("int8", "int8", 0.015),
    ],
)
def test_perplexity_with_smaller_weights(
    expected: dict[str, Any], weight: str, inputs: str, bound: float
) -> None:
    settings = {"weight": weight, "inputs": inputs}
    driver = NativeDriver.of_folder(FILE, READERS, SEQ_LENGTH, chunk=256, **settings)
    perplexity = np.exp(losses(driver, expected["perplexity"]).mean())
    assert perplexity == pytest.approx(expected["perplexity"]["perplexity"], rel=bound)


@pytest.mark.rare
@pytest.mark.parametrize(("cache", "bound"), [("bfloat16", 0.002), ("int8", 0.01)])
def test_perplexity_with_smaller_caches(expected: dict[str, Any], cache: str, bound: float) -> None:
    driver = NativeDriver.of_folder(FILE, READERS, SEQ_LENGTH, chunk=256, cache=cache)
    perplexity = np.exp(losses(driver, expected["perplexity"]).mean())
    assert perplexity == pytest.approx(expected["perplexity"]["perplexity"], rel=bound)


def perplexity_in_groups(expected: dict[str, Any], inputs: str, types: Mapping[str, str]) -> float:
    driver = NativeDriver(
        read_model_config(FILE),
        load_weights(FILE, read_model_config(FILE)),
        READERS,
        SEQ_LENGTH,
        256,
        inputs=inputs,
        types=types,
        cache="float32",
    )
    return float(np.exp(losses(driver, expected["perplexity"]).mean()))


@pytest.mark.rare
@pytest.mark.parametrize(
    ("inputs", "bound"), [("float32", 1e-4), ("bfloat16", 0.005), ("int8", 0.015)]
)
def test_perplexity_as_stored(expected: dict[str, Any], inputs: str, bound: float) -> None:
    types = types_in_groups(load_weights(FILE, read_model_config(FILE)).types)
    assert set(types.values()) == {"q4_1", "q8_0"}
    perplexity = perplexity_in_groups(expected, inputs, types)
    assert perplexity == pytest.approx(expected["perplexity"]["perplexity"], rel=bound)


@pytest.mark.rare
@pytest.mark.parametrize("inputs", ["float32", "int8"])
def test_perplexity_with_int4(expected: dict[str, Any], inputs: str) -> None:
    """What is Q4_1 again comes back; those of whole blocks of 256 inputs are rounded to Q4_K."""
    engine = EngineConfig(weight_dtype="int4")
    types = backend_choice.weight_types_of(
        backend_choice.with_weight_dtype(engine, read_model_config(FILE), "float32")
    )
    assert set(types.values()) == {"q4_1", "q4_k", "q8_0"}
    perplexity = perplexity_in_groups(expected, inputs, types)
    assert perplexity < 1.02 * expected["perplexity"]["perplexity"]


def test_every_string_of_the_tokenizer() -> None:
    tokenizer, parts = load_tokenizer(FILE), read_gguf_tokenizer(FILE)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert parts is not None
    cases = read_json("golden.json")["cases"]
    for case in cases:
        text = case["text"]
        assert tokenizer.encode(text) == case["raw_ids"], text
        assert tokenizer.decode(case["raw_ids"]) == case["raw_decoded"]
        template = ChatTemplate("{{ the_text }}", constants={"the_text": text})
        parsed = HuggingFaceTokenizer(parts.vocabulary, template, (0,))
        assert parsed.encode_messages([{"role": "user", "content": "x"}]) == case["ids"], text
    assert len(cases) == 157


def test_texts_arrive_in_pieces_that_join() -> None:
    tokenizer = load_tokenizer(FILE)
    assert tokenizer is not None
    for case in read_json("golden.json")["cases"]:
        if case["ids"] != case["raw_ids"]:
            continue  # of special tokens, which answers do not show
        detokenizer = tokenizer.detokenizer()
        shown = ""
        for token_id, text in zip(case["raw_ids"], case["prefix_decoded"]):
            shown += detokenizer.push([token_id])
            assert text.startswith(shown)
            assert not text[len(shown) :].strip("\ufffd")
        assert shown + detokenizer.flush() == case["raw_decoded"]
