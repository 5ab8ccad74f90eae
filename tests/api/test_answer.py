"""From tokens to text: what a caller sees of each token, and where an answer ends."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from glm_multiuser.answer import AnswerCollector, Logprob, Piece, Timings, Usage
from glm_multiuser.engine.request import End, Request, Token
from glm_multiuser.errors import GenerationError
from glm_multiuser.sampling import Choice
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.tokenizers import ChatTokenizer
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.mock_runner import EOS, VOCAB

AB, C, CD, YOU_BEGINS, YOU_ENDS, BRACKET, A = 1, 2, 3, 4, 5, 6, 7


def new_answer(tokenizer: Optional[ChatTokenizer] = None, **params: Any) -> AnswerCollector:
    request = Request(
        [1, 2, 3], SamplingParams(**params), "user", (EOS,), 50, VOCAB, lambda event: None
    )
    return AnswerCollector(request, tokenizer or FakeTokenizer())


def feed(answer: AnswerCollector, *token_ids: int) -> list[Piece]:
    """The pieces for these tokens, up to the last of an answer that ends."""
    pieces: list[Piece] = []
    for number, token_id in enumerate(token_ids):
        pieces.append(answer.take(Token(Choice(token_id, None, None), 1.0 + number)))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def end(answer: AnswerCollector, reason: str, error: Optional[GenerationError] = None) -> Piece:
    return answer.take(End(reason, error, 0.5, 9.0))


def test_pieces_join_to_the_text() -> None:
    answer = new_answer()
    pieces = feed(answer, AB, C, A)
    assert pieces == [Piece("ab", (AB,)), Piece("c", (C,)), Piece("A", (A,))]
    assert answer.result is None
    assert end(answer, "length") == Piece("", (), "length")
    assert answer.result is not None
    assert answer.result.text == "abcA"
    assert answer.result.token_ids == (AB, C, A)
    assert answer.result.finish_reason == "length"
    assert answer.result.error is None


def test_counts_and_times() -> None:
    answer = new_answer()
    feed(answer, AB, C)
    end(answer, "length")
    assert answer.result is not None
    assert answer.result.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert answer.result.timings == Timings(0.5, 1.0, 9.0, (1.0, 2.0))


def test_an_answer_without_tokens_has_no_first_one() -> None:
    answer = new_answer()
    end(answer, "cancelled")
    assert answer.result is not None
    assert answer.result.timings == Timings(0.5, None, 9.0, ())
    assert (answer.result.text, answer.result.token_ids) == ("", ())


def test_a_character_is_shown_when_it_is_complete() -> None:
    answer = new_answer()
    assert [piece.text for piece in feed(answer, AB, YOU_BEGINS, YOU_ENDS)] == ["ab", "", "你"]


def test_what_is_left_of_a_character_comes_with_the_end() -> None:
    answer = new_answer()
    feed(answer, AB, YOU_BEGINS)
    assert end(answer, "length").text == "\ufffd"
    assert answer.result is not None
    assert answer.result.text == "ab\ufffd"


def test_an_end_token_has_no_text() -> None:
    answer = new_answer(stop_token_ids=(A,))
    assert [piece.text for piece in feed(answer, AB, A)] == ["ab", ""]
    end(answer, "stop")
    assert answer.result is not None
    assert (answer.result.text, answer.result.token_ids) == ("ab", (AB, A))


def test_an_end_token_that_is_ignored_has_its_own_text() -> None:
    answer = new_answer(ignore_eos=True)
    assert [piece.text for piece in feed(answer, AB, EOS, C)] == ["ab", "", "c"]


@pytest.mark.parametrize(
    ("stop", "tokens", "texts"),
    [
        ("b", (AB,), ["a"]),
        ("bc", (AB, C), ["a", ""]),
        ("bcd", (AB, CD), ["a", ""]),
        ("abc", (AB, C), ["", ""]),
        ("d", (AB, CD), ["ab", "c"]),
        ("cA", (AB, C, A), ["ab", "", ""]),
        ("你", (AB, YOU_BEGINS, YOU_ENDS), ["ab", "", ""]),
        (("A", "bc"), (AB, C, A), ["a", ""]),
        (("abX", "b"), (AB, C), ["a"]),
    ],
)
def test_a_stop_string_ends_the_answer_wherever_it_is_split(
    stop: Any, tokens: tuple[int, ...], texts: list[str]
) -> None:
    answer = new_answer(stop=stop)
    pieces = feed(answer, *tokens, A, A)
    assert [piece.text for piece in pieces] == texts
    assert [piece.finish_reason for piece in pieces] == [None] * (len(texts) - 1) + ["stop"]
    assert pieces[-1].token_ids == (tokens[len(texts) - 1],)
    assert answer.result is not None
    assert answer.result.text == "".join(texts)
    assert answer.result.token_ids == tokens[: len(texts)]
    assert answer.result.finish_reason == "stop"
    # The request ended for its caller with the token that completed the stop string.
    assert answer.result.timings.total_s == float(len(texts))


def test_the_beginning_of_a_stop_string_is_held_back_and_then_shown() -> None:
    answer = new_answer(stop="bcX")
    assert [piece.text for piece in feed(answer, AB, C, A)] == ["a", "", "bcA"]


def test_what_was_held_back_comes_with_the_end() -> None:
    answer = new_answer(stop="bcX")
    feed(answer, AB, C)
    assert end(answer, "length") == Piece("bc", (), "length")


@pytest.mark.parametrize(("reason", "told"), [("length", "stop"), ("cancelled", "cancelled")])
def test_a_stop_string_that_only_the_end_completes(reason: str, told: str) -> None:
    # "[A" may still become "[a]", so the tokenizer gives it out at the end.
    answer = new_answer(stop="[A")
    assert [piece.text for piece in feed(answer, AB, BRACKET, A)] == ["ab", "", ""]
    assert end(answer, reason) == Piece("", (), told)
    assert answer.result is not None
    assert (answer.result.text, answer.result.finish_reason) == ("ab", told)


def test_an_error_keeps_what_came_before_it() -> None:
    answer = new_answer()
    feed(answer, AB)
    error = GenerationError("broken")
    assert end(answer, "error", error).finish_reason == "error"
    assert answer.result is not None
    assert (answer.result.text, answer.result.error) == ("ab", error)


def test_without_a_tokenizer_there_is_no_text() -> None:
    request = Request([1], SamplingParams(), "user", (EOS,), 50, VOCAB, lambda event: None)
    answer = AnswerCollector(request, None)
    assert [piece.text for piece in feed(answer, AB, C)] == ["", ""]
    assert end(answer, "length").text == ""
    assert answer.result is not None
    assert (answer.result.text, answer.result.token_ids) == ("", (AB, C))


def test_log_probabilities_come_where_they_were_asked_for() -> None:
    choices = [Choice(AB, -0.5, {AB: -0.5, C: -1.5}), Choice(C, -2.0, {AB: -0.1, A: -1.0})]
    asked, not_asked = new_answer(logprobs=2), new_answer()
    for answer in (asked, not_asked):
        for choice in choices:
            answer.take(Token(choice, 1.0))
        end(answer, "length")
    assert asked.result is not None
    assert asked.result.logprobs == (
        Logprob(AB, -0.5, {AB: -0.5, C: -1.5}),
        Logprob(C, -2.0, {AB: -0.1, A: -1.0}),
    )
    assert not_asked.result is not None
    assert not_asked.result.logprobs is None


def test_an_answer_without_tokens_has_an_empty_list_of_log_probabilities() -> None:
    answer = new_answer(logprobs=0)
    end(answer, "cancelled")
    assert answer.result is not None
    assert answer.result.logprobs == ()


def test_log_probabilities_of_the_prompt_come_with_the_first_token() -> None:
    answer = new_answer(prompt_logprobs=1)
    # The engine has them when the first token is there.
    answer.request.prompt_logprobs += [Choice(2, -0.5, {2: -0.5}), Choice(3, -1.5, {9: -0.25})]
    known = (None, Logprob(2, -0.5, {2: -0.5}), Logprob(3, -1.5, {9: -0.25}))
    first, second = feed(answer, AB, C)
    assert first == Piece("ab", (AB,), prompt_logprobs=known)
    assert second == Piece("c", (C,))
    assert end(answer, "length").prompt_logprobs is None
    assert answer.result is not None
    assert answer.result.prompt_logprobs == known
    assert answer.result.logprobs is None


@pytest.mark.parametrize("stop", ["ab", "x"])
def test_the_first_token_may_be_the_last(stop: str) -> None:
    answer = new_answer(prompt_logprobs=0, stop=[stop])
    answer.request.prompt_logprobs += [Choice(2, -0.5, {}), Choice(3, -1.5, {})]
    (piece,) = feed(answer, AB)
    assert piece.finish_reason == ("stop" if stop == "ab" else None)
    assert piece.prompt_logprobs is not None
    assert len(piece.prompt_logprobs) == 3


def test_without_a_token_the_prompt_has_none() -> None:
    answer = new_answer(prompt_logprobs=1)
    answer.request.prompt_logprobs += [Choice(2, -0.5, {})]
    assert end(answer, "cancelled").prompt_logprobs is None
    assert answer.result is not None
    assert answer.result.prompt_logprobs is None
