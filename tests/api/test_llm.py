"""The public API with a model in numpy: what goes in, what is refused, what comes out."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Union

import pytest

from glm_multiuser import (
    EngineClosedError,
    GenerationError,
    InvalidParameterError,
    MultiUserLLM,
    Piece,
    PromptTooLongError,
    SamplingParams,
)
from tests.api.fake_tokenizer import FakeTokenizer
from tests.api.mocked import ENDLESS, GREEDY, Open, calls_with
from tests.engine.driving import PATIENCE, wait_until
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, VOCAB, Gate

# What comes out


def test_the_same_request_gives_the_same_answer(llm: MultiUserLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20, logprobs=2)
    first, second = (llm.submit("who", params=params).result() for _ in range(2))
    assert (first.token_ids, first.text, first.logprobs) == (
        second.token_ids,
        second.text,
        second.logprobs,
    )
    assert first.text == FakeTokenizer().decode(first.token_ids)
    assert first.logprobs is not None
    assert [one.token_id for one in first.logprobs] == list(first.token_ids)


def test_a_stream_is_the_result_in_pieces(llm: MultiUserLLM) -> None:
    whole = llm.submit("who", params=GREEDY).result()
    pieces = list(llm.stream_chat("who", params=GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(one for piece in pieces for one in piece.token_ids) == whole.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * 8 + ["length"]


def test_a_stop_string_across_tokens_ends_the_answer(open_llm: Open) -> None:
    calm = SamplingParams(temperature=0.0, max_tokens=60)
    llm = open_llm(users=1, tokenizer=FakeTokenizer())
    whole = llm.submit("who", params=GREEDY).result()
    pieces = [FakeTokenizer().decode([one]) for one in whole.token_ids]
    split = pieces[2][-1] + pieces[3][0]
    assert whole.text.index(split) == len("".join(pieces[:3])) - 1
    params = SamplingParams(temperature=0.0, stop=(split,))
    stopped = llm.submit("who", params=params).result()
    assert stopped.text == "".join(pieces[:3])[:-1]
    assert stopped.token_ids == whole.token_ids[:4]
    assert stopped.finish_reason == "stop"
    early = replace(params, min_tokens=3)
    assert llm.submit("who", params=early).result().token_ids == whole.token_ids[:4]
    late = replace(params, min_tokens=4, max_tokens=8)
    passed = llm.submit("who", params=late).result()
    assert (passed.text, passed.token_ids) == (whole.text, whole.token_ids)
    # The engine does not know the stop string; the handle has cancelled the request.
    assert llm.submit("next", params=calm).result().finish_reason in ("stop", "length")
    assert llm.stats().active_users == 0


def test_chat_gives_the_answer_and_the_longer_history(llm: MultiUserLLM) -> None:
    answer, history = llm.chat("who", params=GREEDY)
    assert answer == f"<{llm.submit('who', params=GREEDY).result().text}>"
    assert history == [("who", answer)]
    again, longer = llm.chat("why", history=history, params=GREEDY)
    assert longer == [("who", answer), ("why", again)]
    assert history == [("who", answer)]


@pytest.mark.parametrize("history", [None, ()])
def test_chat_may_begin_without_history(llm: MultiUserLLM, history: Any) -> None:
    answer, longer = llm.chat("who", history=history, params=GREEDY)
    assert longer == [("who", answer)]


def test_chat_continues_messages_with_messages(llm: MultiUserLLM) -> None:
    before = [{"role": "system", "content": "be brief"}]
    answer, history = llm.chat("who", history=before, params=GREEDY)
    assert history == [
        *before,
        {"role": "user", "content": "who"},
        {"role": "assistant", "content": answer},
    ]


def test_chat_with_ids_has_no_text(llm_of_ids: MultiUserLLM) -> None:
    prompt: Any = [1]
    assert llm_of_ids.chat(prompt, params=GREEDY)[0] == ""


def test_a_failure_is_raised_by_streams_and_chat_and_kept_in_results(
    llm_of_ids: MultiUserLLM,
) -> None:
    failing: Any = [1, FAILS_LATER]
    with pytest.raises(GenerationError, match="not finite"):
        llm_of_ids.chat(failing, params=GREEDY)
    seen: list[Piece] = []
    with pytest.raises(GenerationError, match="not finite"):
        seen.extend(llm_of_ids.stream_chat(failing, params=GREEDY))
    stream = llm_of_ids.stream_chat(failing, params=GREEDY)
    assert [next(stream).finish_reason for _ in range(3)] == [None] * 3
    result = llm_of_ids.submit(failing, params=GREEDY).result()
    assert (result.finish_reason, len(result.token_ids)) == ("error", 3)
    assert isinstance(result.error, GenerationError)
    assert llm_of_ids.submit([1], params=GREEDY).result().finish_reason == "length"


def test_a_chat_that_the_end_of_the_engine_cuts_off_is_no_answer(
    open_llm: Open, gate: Gate
) -> None:
    llm = open_llm(users=1, gated=True)
    prompt: Any = [1]
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(llm.chat, prompt, params=ENDLESS)
        gate.wait()
        gate.let_pass()
        gate.wait()  # there is a token
        closing = threads.submit(llm.close, drain=0.0)
        wait_until(lambda: all(one.cancelled for one in llm._engine._accepted()))
        gate.open()
        with pytest.raises(EngineClosedError, match="closed before the answer was complete"):
            answer.result(PATIENCE)
        closing.result(PATIENCE)


# Going away


@pytest.mark.parametrize("how", ["close", "drop", "leave", "cancel from another thread"])
def test_going_away_frees_the_slot(open_llm: Open, gate: Gate, how: str) -> None:
    llm = open_llm(users=1, gated=True)
    handles = [llm.submit([1], params=ENDLESS)]
    after = llm.submit([2], params=GREEDY)
    gate.wait()
    gate.let_pass()
    gate.wait()  # its second step
    if how == "close":
        handles[0].close()
    elif how == "drop":
        handles.clear()
        gc.collect()
    elif how == "leave":
        with handles[0] as handle:
            assert next(handle).finish_reason is None
    else:
        other = threading.Thread(target=handles[0].cancel)
        other.start()
        other.join(PATIENCE)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) == 2
    for handle in handles:
        assert handle.result(PATIENCE).finish_reason == "cancelled"


def test_a_timeout_lets_the_request_go_on(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)
    handle = llm.submit([1], params=GREEDY)
    gate.wait()
    with pytest.raises(TimeoutError, match="still running after 0 seconds"):
        handle.result(timeout=0)
    gate.open()
    assert handle.result(PATIENCE).finish_reason == "length"


# Batches


def test_results_come_in_the_order_of_the_prompts(llm: MultiUserLLM) -> None:
    prompts = [[n] for n in range(9)]
    results = llm.generate(prompts, GREEDY)
    assert [one.token_ids for one in results] == [
        llm.submit(prompt, params=GREEDY).result().token_ids for prompt in prompts
    ]
    assert llm.generate([], GREEDY) == []


def test_texts_and_ids_may_be_mixed_and_each_have_its_own_parameters(llm: MultiUserLLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 2)]
    prompts: list[Union[str, list[int]]] = ["who", [1, 2], "why"]
    results = llm.generate(iter(prompts), params)
    assert [len(one.token_ids) for one in results] == [3, 1, 2]
    assert [one.usage.prompt_tokens for one in results] == [4, 2, 4]


def test_a_batch_may_be_longer_than_the_queue(open_llm: Open) -> None:
    llm = open_llm(users=2, max_queue=1)
    results = llm.generate([[n] for n in range(30)], GREEDY)
    assert [one.finish_reason for one in results] == ["length"] * 30


def test_a_failure_in_a_batch_is_one_of_its_results(llm_of_ids: MultiUserLLM) -> None:
    results = llm_of_ids.generate([[1], [FAILS_AT_ONCE], [2]], GREEDY)
    assert [one.finish_reason for one in results] == ["length", "error", "length"]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [2]], [GREEDY], "params has 1 entries for 2 prompts; it must have as many"),
        ([[1], []], GREEDY, r"^prompts\[1\]: prompt has 0 tokens"),
        ([[1], [1] * 96], GREEDY, r"^prompts\[1\]: prompt has 96 tokens"),
        ([[1], [99]], GREEDY, r"^prompts\[1\]: prompt\[0\] is 99"),
        ([[1], "text"], GREEDY, r"^prompts\[1\]: .*has no tokenizer"),
        ([[1], [2]], [GREEDY, SamplingParams(stop=("x",))], "without a tokenizer"),
        (
            [[1], [2]],
            [GREEDY, SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))],
            "min_tokens is 1",
        ),
    ],
)
def test_nothing_runs_if_a_prompt_or_its_parameters_are_refused(
    llm_of_ids: MultiUserLLM,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Any,
    params: Any,
    message: str,
) -> None:
    def fail(*what: object) -> None:
        raise AssertionError(f"{what} was submitted")

    monkeypatch.setattr(llm_of_ids._engine, "submit", fail)
    with pytest.raises((InvalidParameterError, PromptTooLongError), match=message):
        llm_of_ids.generate(prompts, params)


@pytest.mark.parametrize("prompts", ["hey", b"hey", None, 5])
def test_one_prompt_is_no_list_of_prompts(llm: MultiUserLLM, prompts: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.generate(prompts)
    limit = "it must be a list of texts or of token ids"
    assert str(caught.value) == f"prompts is {prompts!r}; {limit}"
