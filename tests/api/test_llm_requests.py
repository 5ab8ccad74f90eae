"""What goes into a request, and what is refused."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
import pytest

from glm_multiuser import (
    InvalidParameterError,
    MultiUserLLM,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingParams,
    UserBusyError,
)
from glm_multiuser.token_ids import TokenIds
from tests.api.fake_tokenizer import FakeTokenizer
from tests.api.mocked import ENDLESS, GREEDY, Open, prompts_of, runner_of
from tests.engine.mock_runner import SEQ_LENGTH, VOCAB, Gate

WHOLE = "token ids are whole numbers from 0 to 49"
SEQUENCE = "it must be a text or a sequence of token ids"


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
        (np.array(5), InvalidParameterError, f"prompt is 5; {SEQUENCE}"),
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


def test_a_view_of_bytes_is_refused(llm: MultiUserLLM) -> None:
    prompt: Any = memoryview(b"a")
    with pytest.raises(InvalidParameterError, match=f"^prompt is <memory at .*; {SEQUENCE}$"):
        llm.submit(prompt)


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
