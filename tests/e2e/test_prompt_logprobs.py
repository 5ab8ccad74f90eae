"""Log-probabilities of prompts: against the original code, and against decoding the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser import GenerationResult, InvalidParameterError, MultiUserLLM, SamplingParams
from glm_multiuser.answer import PromptLogprobs
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.handle import Handle
from tests.engine.small_model import CAUSAL, MODEL, prompt
from tests.golden_data import golden_folder
from tests.models.golden_cases import CAUSAL as FAMILIES
from tests.models.golden_cases import read_reference
from tests.poison import fill_with_nan

SEQ_LENGTH = 128
TOP = 3
SCORED = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=TOP)
PLAIN = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=TOP)
KERNELS = ["native", pytest.param("portable", marks=pytest.mark.rare)]


def open_llm(users: int, kernels: str = "native", **settings: Any) -> MultiUserLLM:
    config = replace(CAUSAL, max_sequence_length=SEQ_LENGTH)
    fixed: dict[str, Any] = {"seed": 1, "users": users, "seq_length": SEQ_LENGTH}
    return MultiUserLLM.from_config(config, kernels=kernels, **fixed, **settings)


@pytest.fixture(scope="module", params=KERNELS)
def llm(request: pytest.FixtureRequest) -> Iterator[MultiUserLLM]:
    with open_llm(4, kernels=request.param) as llm:
        yield llm


def scores(result: GenerationResult) -> PromptLogprobs:
    assert result.error is None
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    return result.prompt_logprobs


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_those_of_the_original_code(name: str, kernels: str) -> None:
    reference = read_reference(name)
    cases = [case for case in reference.short if "prompt_all_logits" in case.arrays]
    assert len(cases) == 3
    settings: dict[str, Any] = {"users": 2, "seq_length": SEQ_LENGTH, "kernels": kernels}
    folder = golden_folder(name, "model.safetensors")
    with MultiUserLLM.from_pretrained(folder, **settings) as llm:
        results = llm.generate([case.token_ids for case in cases], SCORED)
    for case, result in zip(cases, results):
        known = log_softmax(case.arrays["prompt_all_logits"])
        assert len(scores(result)) == len(case.token_ids)
        for place, one in enumerate(scores(result)[1:], 1):
            assert one is not None
            assert one.token_id == case.token_ids[place]
            row = known[place - 1]
            assert one.logprob == pytest.approx(row[one.token_id], abs=case.tolerance)
            assert len(one.top) == TOP
            best = np.sort(row)[::-1][:TOP]
            np.testing.assert_allclose(list(one.top.values()), best, atol=case.tolerance)


def test_they_are_those_of_the_tokens_when_they_were_decoded(llm: MultiUserLLM) -> None:
    """With native kernels to the last bit: it does not matter how a token came in."""
    for seed in range(3):
        asked = prompt(seed, 3 + 7 * seed)
        answer = llm.submit(asked, params=PLAIN).result()
        whole = llm.submit([*asked, *answer.token_ids], params=SCORED).result()
        assert answer.logprobs is not None
        behind = scores(whole)[len(asked) :]
        if llm.stats().kernels == "native":
            assert behind == answer.logprobs
        for one, decoded in zip(behind, answer.logprobs):
            assert one is not None
            assert one.token_id == decoded.token_id
            assert one.logprob == pytest.approx(decoded.logprob, abs=1e-5)
    assert llm.stats().compiles_after_ready == 0


def test_alone_as_beside_others_to_the_last_bit(llm: MultiUserLLM) -> None:
    prompts = [prompt(seed, 1 + seed * 23 % 100) for seed in range(10)]
    params = [PLAIN if seed % 3 == 1 else SCORED for seed in range(10)]
    alone = [llm.submit(one, params=of_it).result() for one, of_it in zip(prompts, params)]
    together = llm.generate(prompts, params)
    for first, second in zip(alone, together):
        assert first.prompt_logprobs == second.prompt_logprobs
        assert first.logprobs == second.logprobs
        assert first.token_ids == second.token_ids
    assert llm.stats().mean_batch > 1
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_where_a_prompt_is_cut_changes_no_bit(chunk: int) -> None:
    asked = prompt(4, 90)
    found = []
    for users, length in ((3, chunk), (1, None)):
        with open_llm(users, prefill_chunk=length) as llm:
            found.append(scores(llm.submit(asked, params=SCORED).result()))
    assert found[0] == found[1]


def test_the_logprobs_of_the_answer_are_not_touched(llm: MultiUserLLM) -> None:
    asked = prompt(6, 40)
    plain = llm.submit(asked, params=PLAIN).result()
    scored = llm.submit(asked, params=replace(PLAIN, prompt_logprobs=1)).result()
    assert scored.token_ids == plain.token_ids
    if llm.stats().kernels == "native":
        assert scored.logprobs == plain.logprobs
    assert scored.usage == plain.usage


def test_the_first_piece_has_them(llm: MultiUserLLM) -> None:
    handle = llm.submit(prompt(7, 20), params=SCORED)
    first, *rest = list(handle)
    assert first.prompt_logprobs == scores(handle.result())
    assert all(piece.prompt_logprobs is None for piece in rest)


def test_a_user_whose_slot_holds_the_prompt(llm: MultiUserLLM) -> None:
    asked = prompt(8, 50)
    fresh = llm.submit(asked, params=SCORED, user="me").result()
    again = llm.submit(asked, params=SCORED, user="me").result()
    assert scores(again) == scores(fresh)
    assert again.usage.cached_tokens == 0
    assert llm.submit(asked, params=PLAIN, user="me").result().usage.cached_tokens == 49


def test_a_resize_in_the_middle_changes_no_bit() -> None:
    asked = prompt(9, 100)
    with open_llm(3) as llm:
        expected = scores(llm.submit(asked, params=SCORED).result())

        def move() -> list[Handle]:
            handles = [llm.submit(asked, params=SCORED) for _ in range(3)]
            for _ in range(2):
                assert llm._engine.step()
            states = [slot.state for slot in llm.slots()]
            assert states == ["prefill"] * 3
            llm._engine._resize(2, lambda *what: None)
            return handles

        handles: list[Handle] = DEVICE_THREAD.call(move)
        assert [scores(one.result()) for one in handles] == [expected] * 3


def test_nan_in_a_slot_ends_its_request_alone() -> None:
    asked = prompt(10, 100)
    with open_llm(2) as llm:
        expected = scores(llm.submit(asked, params=SCORED).result())

        def begin_and_poison() -> list[Handle]:
            handles = [llm.submit(asked, params=SCORED, user=name) for name in ("bad", "good")]
            for _ in range(2):
                assert llm._engine.step()
            (slot,) = [n for n, one in enumerate(llm.slots()) if one.user == "bad"]
            runner: Any = llm._runner
            fill_with_nan(runner, slot)
            return handles

        handles: list[Handle] = DEVICE_THREAD.call(begin_and_poison)
        bad, good = (one.result() for one in handles)
        assert bad.finish_reason == "error"
        assert bad.prompt_logprobs is None
        assert "not finite" in str(bad.error)
        assert scores(good) == expected
        assert scores(llm.submit(asked, params=SCORED, user="bad").result()) == expected


def test_a_model_whose_prompts_see_themselves_in_both_directions_has_none() -> None:
    with MultiUserLLM.from_config(MODEL, users=1, seq_length=32) as llm:
        with pytest.raises(InvalidParameterError, match="it must be None") as error:
            llm.submit([1, 2], params=SCORED)
        assert error.value.field == "prompt_logprobs"
