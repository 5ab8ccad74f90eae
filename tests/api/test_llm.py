"""The public API with a model in numpy: what goes in, what is refused, what comes out."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from array import array
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional, Union

import numpy as np
import pytest

import glm_multiuser.llm
from glm_multiuser import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineConfig,
    GenerationError,
    InvalidParameterError,
    ModelConfig,
    MultiUserLLM,
    Piece,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingParams,
    UserBusyError,
)
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.token_ids import TokenIds
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.driving import PATIENCE, wait_until
from tests.engine.mock_runner import (
    EOS,
    FAILS_AT_ONCE,
    FAILS_LATER,
    SEQ_LENGTH,
    VOCAB,
    Call,
    Gate,
    MockRunner,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
WHOLE = "token ids are whole numbers from 0 to 49"
SEQUENCE = "it must be a text or a sequence of token ids"

Open = Callable[..., MultiUserLLM]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def open_llm(gate: Gate) -> Iterator[Open]:
    """Makes engines around mocks, and closes them; `gated` ones stop before every step."""
    opened: list[MultiUserLLM] = []

    def make(
        users: int = 2,
        tokenizer: Optional[FakeTokenizer] = None,
        params: Optional[SamplingParams] = None,
        gated: bool = False,
        before: Callable[[Call], None] = lambda call: None,
        **settings: Any,
    ) -> MultiUserLLM:
        runner = MockRunner(users, gate if gated else before)
        config = EngineConfig(users=users, seq_length=SEQ_LENGTH, **settings)
        llm = MultiUserLLM(
            runner,  # type: ignore[arg-type]
            config,
            tokenizer,
            params or SamplingParams(),
            (EOS,),
            1.5,
        )
        opened.append(llm)
        return llm

    yield make
    gate.open()
    for llm in opened:
        llm.close(drain=0.0)


@pytest.fixture
def llm(open_llm: Open) -> MultiUserLLM:
    return open_llm(tokenizer=FakeTokenizer())


@pytest.fixture
def llm_of_ids(open_llm: Open) -> MultiUserLLM:
    return open_llm()


def runner_of(llm: MultiUserLLM) -> MockRunner:
    runner: Any = llm._runner
    return runner


def prompts_of(llm: MultiUserLLM) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in runner_of(llm).requests_of("prefill")]


# What goes in


def test_token_ids_are_used_as_they_are(llm: MultiUserLLM) -> None:
    llm.submit([3, 1, 2], params=GREEDY).result()
    assert prompts_of(llm) == [(3, 1, 2)]


def test_text_goes_through_the_tokenizer(llm: MultiUserLLM) -> None:
    llm.submit("hi", params=GREEDY).result()
    llm.stream_chat("hi", params=GREEDY).result()
    assert prompts_of(llm) == [tuple(FakeTokenizer().encode_prompt("hi"))] * 2


def test_history_may_be_pairs_or_messages(llm: MultiUserLLM) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for history in ([("a", "b")], messages):
        llm.submit("c", params=GREEDY, history=history).result()
    assert prompts_of(llm) == [tuple(FakeTokenizer().encode("|a|b|c"))] * 2


def test_token_ids_of_a_tokenizer_that_the_model_lacks_are_rejected(llm: MultiUserLLM) -> None:
    """A device that met one would fail for every user from then on."""
    ids = FakeTokenizer().encode_prompt("hi")
    llm._vocab_size = max(ids)
    wanted = f"prompt has token id {max(ids)}; those of this model are below {max(ids)}"
    for ask in (llm.submit, lambda text: llm.chat_token_ids([{"role": "user", "content": text}])):
        with pytest.raises(InvalidParameterError, match=wanted) as caught:
            ask("hi")
        assert caught.value.field == "prompt"
    assert runner_of(llm).requests_of("prefill") == []


@pytest.mark.parametrize("history", [[("a",)], [{"role": "user", "content": "a"}], ["ab"], "ab"])
def test_a_history_that_is_none_is_refused(llm: MultiUserLLM, history: Any) -> None:
    with pytest.raises(InvalidParameterError, match="history"):
        llm.submit("c", params=GREEDY, history=history)


def test_parameters_default_to_the_checkpoints(open_llm: Open) -> None:
    llm = open_llm(params=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert llm.submit([1]).result().usage.completion_tokens == 3
    assert llm.submit([1], params=GREEDY).result().usage.completion_tokens == 8


@pytest.mark.parametrize("user", [7, "alice", None])
def test_users_are_numbers_texts_or_anonymous(llm_of_ids: MultiUserLLM, user: Any) -> None:
    assert llm_of_ids.submit([1], params=GREEDY, user=user).result().finish_reason == "length"


def test_anonymous_users_share_no_slot(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=2, gated=True)
    handles = [llm.submit([1], params=GREEDY) for _ in range(2)]
    gate.open()
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 2
    assert max(len(call.requests) for call in runner_of(llm).calls) == 2


def test_requests_of_one_user_run_one_after_the_other(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=2, gated=True)
    handles = [llm.submit([1], params=GREEDY, user="a") for _ in range(2)]
    gate.open()
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 2
    assert max(len(call.requests) for call in runner_of(llm).calls) == 1


def test_ids_are_checked_once(llm: MultiUserLLM) -> None:
    for ids in (llm.prompt_token_ids("hi"), llm.prompt_token_ids([3, 1])):
        assert llm.prompt_token_ids(ids) is ids
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.chat_token_ids(messages)
    assert llm.prompt_token_ids(ids) is ids
    assert llm.submit(ids, params=GREEDY).result().finish_reason == "length"


def test_ids_for_another_vocabulary_are_checked(llm: MultiUserLLM) -> None:
    with pytest.raises(InvalidParameterError, match=rf"prompt\[0\] is {VOCAB}; {WHOLE}"):
        llm.submit(TokenIds([VOCAB], VOCAB + 1))


# What is refused


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], InvalidParameterError, "prompt has 0 tokens; it must have at least 1"),
        (
            [1] * SEQ_LENGTH,
            PromptTooLongError,
            "prompt has 96 tokens; with seq_length 96 it may have at most 95",
        ),
        (
            [1, VOCAB],
            InvalidParameterError,
            f"prompt[1] is 50; {WHOLE}",
        ),
        ([-1], InvalidParameterError, f"prompt[0] is -1; {WHOLE}"),
        (None, InvalidParameterError, f"prompt is None; {SEQUENCE}"),
        (5, InvalidParameterError, f"prompt is 5; {SEQUENCE}"),
        (b"abc", InvalidParameterError, f"prompt is b'abc'; {SEQUENCE}"),
        ({1: 2}, InvalidParameterError, f"prompt is {{1: 2}}; {SEQUENCE}"),
        ([10**5000], InvalidParameterError, f"prompt[0] is <int>; {WHOLE}"),
        ([True], InvalidParameterError, f"prompt[0] is True; {WHOLE}"),
        (
            [1.0],
            InvalidParameterError,
            f"prompt[0] is 1.0; {WHOLE}",
        ),
        (
            ["a"],
            InvalidParameterError,
            f"prompt[0] is 'a'; {WHOLE}",
        ),
        (
            "text",
            InvalidParameterError,
            "prompt is the text 'text', and this checkpoint has no tokenizer; give token ids",
        ),
    ],
)
def test_prompts_that_are_refused(
    llm_of_ids: MultiUserLLM, prompt: Any, error: type[RequestError], message: str
) -> None:
    for ask in (llm_of_ids.submit, llm_of_ids.stream_chat, llm_of_ids.chat):
        with pytest.raises(error) as caught:
            ask(prompt)
        assert (str(caught.value), caught.value.field) == (message, "prompt")
    assert runner_of(llm_of_ids).calls == []


@pytest.mark.parametrize("prompt", [np.array([3, 1, 2]), array("i", [3, 1, 2])])
def test_token_ids_may_be_an_array(llm_of_ids: MultiUserLLM, prompt: Any) -> None:
    llm_of_ids.submit(prompt, params=GREEDY).result()
    assert prompts_of(llm_of_ids) == [(3, 1, 2)]


def test_a_text_that_is_too_long_is_counted_in_tokens(llm: MultiUserLLM) -> None:
    with pytest.raises(PromptTooLongError, match="prompt has 101 tokens; with seq_length 96"):
        llm.submit("x" * 100)


def test_the_longest_prompt_gets_one_token(llm_of_ids: MultiUserLLM) -> None:
    result = llm_of_ids.submit([1] * (SEQ_LENGTH - 1), params=ENDLESS).result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 1)


def test_history_belongs_to_text(llm: MultiUserLLM) -> None:
    with pytest.raises(
        InvalidParameterError, match="history needs a prompt that is text"
    ) as caught:
        llm.submit([1], history=[("a", "b")])
    assert caught.value.field == "history"


def test_stop_strings_need_a_tokenizer(llm_of_ids: MultiUserLLM) -> None:
    with pytest.raises(
        InvalidParameterError, match=r"stop is \('x',\); without a tokenizer"
    ) as caught:
        llm_of_ids.submit([1], params=SamplingParams(stop=("x",)))
    assert caught.value.field == "stop"


@pytest.mark.parametrize("user", [True, 1.5, b"alice", ("a",)])
def test_users_of_another_type_are_refused(llm_of_ids: MultiUserLLM, user: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm_of_ids.submit([1], user=user)
    assert str(caught.value) == f"user is {user!r}; it must be an int, a str or None"
    assert caught.value.field == "user"


def test_users_of_many_digits_are_refused(llm_of_ids: MultiUserLLM) -> None:
    for user in (10**5000, -(2**63)):
        with pytest.raises(InvalidParameterError, match="bits; it may have at most 63") as caught:
            llm_of_ids.submit([1], user=user)
        assert caught.value.field == "user"
    assert llm_of_ids.submit([1], user=2**63 - 1, params=GREEDY).result().finish_reason == "length"


def test_owners_of_another_type_are_refused(llm_of_ids: MultiUserLLM) -> None:
    """The engine goes on: its thread would fail with the type's own error."""
    owner: Any = "secret"
    for ask in (
        lambda: llm_of_ids.submit([1], user="a", owner=owner),
        lambda: llm_of_ids.forget("a", owner=owner),
        lambda: llm_of_ids.sessions(owner),
    ):
        with pytest.raises(InvalidParameterError, match="owner is of <class 'str'>") as caught:
            ask()
        assert caught.value.field == "owner"
        assert "secret" not in str(caught.value)
    assert llm_of_ids.submit([1], user="a", params=GREEDY).result().finish_reason == "length"


def test_a_full_queue_rejects_a_request(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True, max_queue=1)
    handles = [llm.submit([n], params=GREEDY, user=n) for n in range(2)]
    with pytest.raises(QueueFullError):
        llm.submit([2], params=GREEDY, user=2)
    gate.open()
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 2


def test_a_busy_user_is_rejected(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True, max_queue_per_user=1)
    first = llm.submit([1], params=GREEDY, user="a")
    gate.wait()
    second = llm.submit([2], params=GREEDY, user="a")
    with pytest.raises(UserBusyError) as caught:
        llm.submit([3], params=GREEDY, user="a")
    assert caught.value.field == "user"
    gate.open()
    assert [first.result().finish_reason, second.result().finish_reason] == ["length"] * 2


# Old ways to call

OLD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("submit", ("c", GREEDY, "alice", [("a", "b")]), {}),
    ("submit", ("c", GREEDY), {"user": "alice", "history": [("a", "b")]}),
    ("stream_chat", ("c", [("a", "b")], "alice", GREEDY), {}),
    ("stream_chat", ("c", [("a", "b")]), {"params": GREEDY, "user": "alice"}),
    ("chat", ("c", [("a", "b")], "alice", GREEDY), {}),
    ("chat", (), {"query": "c", "history": [("a", "b")], "user": "alice", "params": GREEDY}),
]


@pytest.mark.parametrize(("name", "arguments", "named"), OLD_CALLS)
def test_the_old_order_of_arguments_goes_on_working(
    llm: MultiUserLLM, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    new = llm.submit("c", user="alice", history=[("a", "b")], params=GREEDY).result()
    with pytest.warns(DeprecationWarning, match=f"since 0.2, {name} takes one prompt") as warned:
        handle = getattr(llm, name)(*arguments, **named)
    deprecations = [
        one for one in warned if one.category is DeprecationWarning
    ]  # not those of a clean-up
    assert [one.filename for one in deprecations] == [__file__]
    if name == "chat":
        assert handle == llm.chat("c", user="alice", history=[("a", "b")], params=GREEDY)
    else:
        assert handle.result().token_ids == new.token_ids
    asked = runner_of(llm).requests_of("prefill")
    assert {one.prompt_token_ids for one in asked} == {asked[0].prompt_token_ids}
    assert {one.user for one in asked} == {"alice"}


def test_the_old_order_of_arguments_with_asyncio(llm: MultiUserLLM) -> None:
    expected = llm.submit("c", history=[("a", "b")], params=GREEDY).result()

    async def ask() -> tuple[str, str]:
        with pytest.warns(DeprecationWarning, match="asubmit takes one prompt"):
            result = await llm.asubmit("c", GREEDY, "alice", [("a", "b")]).result()  # type: ignore[arg-type, call-arg]
        with pytest.warns(DeprecationWarning, match="astream_chat takes one prompt"):
            stream = llm.astream_chat("c", [("a", "b")], "alice", GREEDY)  # type: ignore[arg-type, call-arg]
        return result.text, "".join([piece.text async for piece in stream])

    assert asyncio.run(ask()) == (expected.text, expected.text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("c", (), "alice", None, "more"), {}),
        (("c", ()), {"history": ()}),
        (("c",), {"query": "c"}),
    ],
)
def test_what_no_order_allows(
    llm: MultiUserLLM, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.warns(DeprecationWarning, match="one prompt"), pytest.raises(TypeError):
        llm.chat(*arguments, **named)


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
    # The engine, which does not know of the stop string, was told.
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


def calls_with(llm: MultiUserLLM, prompt: tuple[int, ...]) -> int:
    return sum(
        prompt in {request.prompt_token_ids for request in call.requests.values()}
        for call in runner_of(llm).calls
    )


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
        ([[1], []], GREEDY, "prompt has 0 tokens"),
        ([[1], [1] * 96], GREEDY, "prompt has 96 tokens"),
        ([[1], [99]], GREEDY, r"prompt\[0\] is 99"),
        ([[1], "text"], GREEDY, "has no tokenizer"),
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


# asyncio


async def read(llm: MultiUserLLM, prompt: Any, params: SamplingParams) -> list[Piece]:
    return [piece async for piece in llm.astream_chat(prompt, params=params)]


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_several_async_streams_at_once(llm: MultiUserLLM) -> None:
    questions = [f"question {number}" for number in range(6)]
    expected = [llm.submit(question, params=GREEDY).result() for question in questions]

    async def all_at_once() -> list[list[Piece]]:
        return await asyncio.gather(*(read(llm, question, GREEDY) for question in questions))

    for pieces, whole in zip(run_async(all_at_once()), expected):
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(one for piece in pieces for one in piece.token_ids) == whole.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * 8 + ["length"]


def test_an_async_stream_raises_what_submit_raises(llm_of_ids: MultiUserLLM) -> None:
    with pytest.raises(InvalidParameterError, match="has no tokenizer"):
        run_async(read(llm_of_ids, "text", GREEDY))


def test_an_async_stream_raises_a_failure(llm_of_ids: MultiUserLLM) -> None:
    with pytest.raises(GenerationError, match="not finite"):
        run_async(read(llm_of_ids, [FAILS_LATER], GREEDY))


def test_a_stop_string_ends_an_async_stream(open_llm: Open) -> None:
    llm = open_llm(users=1, tokenizer=FakeTokenizer())
    text = llm.submit("who", params=GREEDY).result().text
    params = SamplingParams(temperature=0.0, stop=(text[2:5],))
    pieces = run_async(read(llm, "who", params))
    assert "".join(piece.text for piece in pieces) == text[:2]
    assert pieces[-1].finish_reason == "stop"


def test_cancelling_the_task_frees_the_slot(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)

    async def cancel_while_it_waits() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(read(llm, [1], ENDLESS))
        await loop.run_in_executor(None, gate.wait)
        gate.let_pass()
        await loop.run_in_executor(None, gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(cancel_while_it_waits())
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) == 2


def test_a_consumer_that_breaks_out_frees_the_slot(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)

    def one_step() -> None:
        gate.wait()
        gate.let_pass()

    async def break_out() -> None:
        stepping = asyncio.get_running_loop().run_in_executor(None, one_step)
        async for piece in llm.astream_chat([1], params=ENDLESS):
            assert piece.finish_reason is None
            break
        await stepping

    run_async(break_out())
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) <= 2


def test_a_loop_that_is_gone_does_not_disturb_the_engine(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)
    loop = asyncio.new_event_loop()
    stream = llm.astream_chat([1], params=ENDLESS)
    first: asyncio.Task[Any] = loop.create_task(stream.__anext__())  # type: ignore[arg-type]
    loop.call_soon(loop.stop)
    loop.run_forever()
    gate.wait()
    first.cancel()
    loop.run_until_complete(asyncio.gather(first, return_exceptions=True))
    loop.close()
    gate.open()
    assert llm.submit([2], params=GREEDY).result(PATIENCE).finish_reason == "length"


def test_a_request_whose_loop_is_gone_is_cancelled(
    open_llm: Open, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    llm = open_llm(users=1, gated=True)

    async def ask() -> Any:
        return llm.asubmit([1], params=ENDLESS)

    kept = run_async(ask())  # so that it is not cancelled with its last reference
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) == 1
    assert kept.finished is None
    # Not for each event.
    assert [one.getMessage() for one in caplog.records] == [
        f"request {kept.number} is cancelled: its receiver failed"
    ]


# Size, numbers, end


def test_stats_describe_the_engine(open_llm: Open) -> None:
    llm = open_llm(users=3)
    llm.generate([[1, 2], [3]], GREEDY)
    llm.submit([4], params=GREEDY, user="a").result()
    stats = llm.stats()
    # A slot is kept for a user with a name, who may come back.
    assert (stats.users, stats.active_users, stats.idle_users, stats.waiting) == (3, 0, 1, 0)
    assert (stats.prompt_tokens, stats.tokens_generated) == (4, 24)
    assert (stats.compiles, stats.compiles_after_ready) == (3, 0)
    assert 1 <= stats.mean_batch <= 2
    assert stats.cache_bytes_per_user == MockRunner.cache_bytes_per_user
    assert stats.start_seconds == 1.5
    assert stats.overhead_seconds > 0
    assert stats.batch_invariant


def test_stats_of_an_engine_that_did_nothing(llm: MultiUserLLM) -> None:
    assert llm.stats().mean_batch == 0
    assert llm.stats().steps == 0


def test_a_resize_while_requests_run(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=2, gated=True)
    handles = [llm.submit([n], params=GREEDY) for n in range(3)]
    for _ in range(3):
        gate.wait()
        gate.let_pass()
    gate.open()
    seen: list[str] = []
    llm.resize(5, progress=lambda done, total, what: seen.append(what))
    results = [handle.result() for handle in handles]
    assert llm.config.users == llm.stats().users == 5
    assert llm.stats().compiles_after_ready == 0
    assert seen == ["mock"]
    expected = open_llm(users=1).generate([[n] for n in range(3)], GREEDY)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]


def test_a_resize_out_of_range_changes_nothing(llm: MultiUserLLM) -> None:
    with pytest.raises(ConfigError, match="users is 0; it must be between 1 and 1024"):
        llm.resize(0)
    assert llm.stats().users == 2
    assert runner_of(llm).calls == []


def test_cells_shrink_and_grow_with_the_users(open_llm: Open) -> None:
    llm = open_llm(users=4, users_per_cell=3)
    llm.resize(2)
    assert (llm.config.users, llm.config.users_per_cell) == (2, 2)
    llm.resize(5)
    assert (llm.config.users, llm.config.users_per_cell) == (5, 3)
    with pytest.raises(ConfigError, match="users is 0"):
        llm.resize(0)
    with pytest.raises(ConfigError, match="users is '3'"):
        llm.resize("3")  # type: ignore[arg-type]


def test_a_resize_that_fails_leaves_the_old_size(open_llm: Open) -> None:
    def refuse(call: Call) -> None:
        if call.users == 9:
            raise MemoryError("9 are too many")

    llm = open_llm(users=2, before=refuse)
    with pytest.raises(MemoryError, match="9 are too many"):
        llm.resize(9)
    assert llm.config.users == llm.stats().users == 2
    assert llm.stats().compiles_after_ready == 0
    assert llm.submit([1], params=GREEDY).result().finish_reason == "length"


def test_leaving_the_block_finishes_what_was_accepted(open_llm: Open) -> None:
    with open_llm(users=1) as llm:
        handles = [llm.submit([n], params=GREEDY) for n in range(4)]
    assert [handle.result().finish_reason for handle in handles] == ["length"] * 4
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        llm.submit([1])
    assert llm.stats().active_users == 0
    llm.close()


def test_leaving_the_block_with_an_error_does_not_wait(
    llm: MultiUserLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(llm, "close", lambda drain: drains.append(drain))
        with pytest.raises(ZeroDivisionError), llm:
            raise ZeroDivisionError
        with llm:
            pass
    assert drains == [0.0, 30.0]


# From a folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose weights are not read, because the runner is a mock."""
    values = {
        "model_type": "chatglm",
        "position_encoding_2d": True,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "inner_hidden_size": 128,
        "eos_token_id": 17,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(glm_multiuser.llm, "load_weights", lambda folder, model_config: None)
    monkeypatch.setattr(
        glm_multiuser.llm,
        "build_runner",
        lambda model_config, config, fill, progress: (MockRunner(config.users), None),
    )
    return tmp_path


def test_defaults_come_from_generation_config_json(folder: Path) -> None:
    values = {"do_sample": False, "max_new_tokens": 5, "top_p": 0.7, "eos_token_id": [9, 17]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    with MultiUserLLM.from_pretrained(folder, users=3, seq_length=SEQ_LENGTH) as llm:
        assert llm.default_params == SamplingParams(temperature=0.0, top_p=0.7, max_tokens=5)
        assert llm.tokenizer is None
        assert llm.stop_token_ids == (9, 17)
        assert llm.config == EngineConfig(users=3, seq_length=SEQ_LENGTH)
        assert len(llm.submit([1]).result().token_ids) <= 5


def test_without_generation_config_json_the_defaults_are_our_own(folder: Path) -> None:
    with MultiUserLLM.from_pretrained(str(folder)) as llm:
        assert llm.default_params == SamplingParams()


@pytest.mark.parametrize("value", ["high", 7.0])
def test_defaults_that_cannot_work(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"top_p": value}))
    with pytest.raises(CheckpointError, match="top_p"):
        MultiUserLLM.from_pretrained(folder)


def test_settings_are_checked_before_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="users is 0"):
        MultiUserLLM.from_pretrained(tmp_path / "missing", users=0)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        MultiUserLLM.from_pretrained(tmp_path / "missing")


def test_a_model_with_random_weights(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    with MultiUserLLM.from_config(config, users=4, seq_length=SEQ_LENGTH) as llm:
        assert llm.config == EngineConfig(users=4, seq_length=SEQ_LENGTH)
        assert llm.stop_token_ids == (17,)
        assert llm.default_params == SamplingParams()


# For servers


def test_an_async_handle_has_pieces_and_a_result(open_llm: Open) -> None:
    llm = open_llm(tokenizer=FakeTokenizer())
    expected = llm.submit("who", params=GREEDY).result()

    async def ask() -> tuple[str, Any, Any]:
        with llm.asubmit("who", params=GREEDY) as handle:
            assert handle.finished is None
            text = "".join([piece.text async for piece in handle])
            return text, handle.finished, await handle.result()

    text, finished, result = run_async(ask())
    assert text == result.text == expected.text
    assert finished is result
    assert result.token_ids == expected.token_ids


def test_an_async_result_has_the_error_of_its_request(llm_of_ids: MultiUserLLM) -> None:
    async def ask() -> Any:
        return await llm_of_ids.asubmit([FAILS_AT_ONCE], params=GREEDY).result()

    result = run_async(ask())
    assert result.finish_reason == "error"
    assert isinstance(result.error, GenerationError)


def test_asubmit_refuses_at_once(llm_of_ids: MultiUserLLM) -> None:
    async def ask() -> None:
        with pytest.raises(InvalidParameterError, match=WHOLE):
            llm_of_ids.asubmit([VOCAB], params=GREEDY)

    run_async(ask())


def test_pieces_that_wait_can_be_counted(open_llm: Open) -> None:
    llm = open_llm()

    async def ask() -> tuple[int, int]:
        handle = llm.asubmit([1], params=GREEDY)
        first = await handle.__anext__()
        while llm.stats().tokens_generated != GREEDY.max_tokens or llm.stats().active_users:
            await asyncio.sleep(0)
        # Until the step is over that frees the slot, and the loop has taken in its last event.
        await asyncio.to_thread(DEVICE_THREAD.call, lambda: None)
        waiting = handle.waiting_pieces
        await handle.result()
        assert first.token_ids
        return waiting, handle.waiting_pieces

    # Seven more tokens, and the end.
    assert run_async(ask()) == (8, 0)


def test_slots_steps_and_numbers_are_told(open_llm: Open) -> None:
    llm = open_llm(users=2)
    told: list[str] = []
    llm.on_step(lambda report: told.append(report.kind))
    first, second = (llm.submit([1], params=GREEDY, user=user) for user in ("a", "b"))
    first.result()
    second.result()
    assert first.number != second.number
    assert {slot.user for slot in llm.slots()} == {"a", "b"}
    assert {slot.state for slot in llm.slots()} == {"idle"}
    assert set(told) == {"prefill", "decode"}
    assert llm.failure is None


def test_pieces_carry_the_log_probabilities_of_their_tokens(llm_of_ids: MultiUserLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    handle = llm_of_ids.submit([1], params=params)
    pieces = list(handle)
    told = [one for piece in pieces for one in piece.logprobs or ()]
    assert tuple(told) == handle.result().logprobs
    assert [one.token_id for one in told] == [one for piece in pieces for one in piece.token_ids]


def test_while_a_model_is_loaded_the_others_go_on(
    open_llm: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that only ends once another engine's request has ended."""
    other = open_llm(users=1)
    answered: list[Any] = []

    def build(*arguments: Any) -> tuple[MockRunner, None]:
        _, config, _, progress = arguments
        handle = other.submit([1], params=GREEDY)
        deadline = threading.Event()
        while other.stats().tokens_generated < 8:
            deadline.wait(0.001)  # what a graph takes to compile
            progress(0, 1, "a graph")
        answered.append(handle.result(0.0) if other.stats().active_users == 0 else None)
        return MockRunner(config.users), None

    monkeypatch.setattr(glm_multiuser.llm, "build_runner", build)
    with MultiUserLLM.from_pretrained(folder, users=1, seq_length=SEQ_LENGTH):
        assert len(answered[0].token_ids) == 8
