"""The format of log-probabilities."""

from __future__ import annotations

import math
from typing import Optional

from glm_multiuser.answer import Logprob, Piece
from glm_multiuser.server.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
)
from glm_multiuser.tokenizers import AnswerTokens
from glm_multiuser.tokenizers.base import Vocabulary
from tests.api.fake_tokenizer import FakeTokenizer

AB, C, HALF, OTHER_HALF = 1, 2, 4, 5  # pieces of the tokenizer: "ab", "c", the two parts of 你


def tokens() -> AnswerTokens:
    """Of a new answer."""
    return FakeTokenizer().answer_tokens()


def piece(token_id: int, text: str, top: Optional[dict[int, float]] = None) -> Piece:
    return Piece(text, (token_id,), None, (Logprob(token_id, -0.5, top or {}),))


def test_chat_shows_text_and_bytes_of_every_token() -> None:
    written = chat_logprobs(tokens(), [Logprob(AB, -0.5, {AB: -0.5, C: -1.5})])
    assert written == {
        "content": [
            {
                "token": "ab",
                "logprob": -0.5,
                "bytes": [97, 98],
                "top_logprobs": [
                    {"token": "ab", "logprob": -0.5, "bytes": [97, 98]},
                    {"token": "c", "logprob": -1.5, "bytes": [99]},
                ],
            }
        ],
        "refusal": None,
    }


def test_the_bytes_of_parts_of_a_character_join_to_it() -> None:
    parts = [Logprob(HALF, -1.0, {}), Logprob(OTHER_HALF, -1.0, {})]
    content = chat_logprobs(tokens(), parts)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "你"
    assert "\ufffd" in content[0]["token"]


def test_without_a_tokenizer_tokens_have_numbers() -> None:
    logprob = Logprob(AB, -0.5, {C: -0.25})
    (entry,) = chat_logprobs(None, [logprob])["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:1", None)
    assert entry["top_logprobs"][0]["token"] == "token_id:2"
    written = completion_logprobs(None, [piece(AB, "", {C: -0.25})], 0, True)
    assert written["tokens"] == ["token_id:1"]
    assert written["top_logprobs"] == [{"token_id:2": -0.25, "token_id:1": -0.5}]


def test_no_probability_is_a_number_that_json_can_write() -> None:
    (entry,) = chat_logprobs(tokens(), [Logprob(AB, -math.inf, {AB: -math.inf})])["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    impossible = Piece("", (AB,), None, (Logprob(AB, -math.inf, {}),))
    written = completion_logprobs(tokens(), [impossible], 0, True)
    assert written["token_logprobs"] == [-9999.0]
    assert written["top_logprobs"] == [{"ab": -9999.0}]


def test_completions_have_one_list_for_each_question() -> None:
    pieces = [piece(AB, "ab", {AB: -0.5}), piece(C, "c", {AB: -0.25, C: -0.5})]
    assert completion_logprobs(tokens(), pieces, 10, True) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5}, {"ab": -0.25, "c": -0.5}],
        "text_offset": [10, 12],
    }


def test_the_chosen_token_is_among_the_best_ones_even_if_it_is_not() -> None:
    written = completion_logprobs(tokens(), [piece(C, "c", {AB: -0.25})], 0, True)
    assert written["top_logprobs"] == [{"ab": -0.25, "c": -0.5}]


def test_without_best_ones_there_is_no_list_of_them() -> None:
    assert completion_logprobs(tokens(), [piece(C, "c")], 0, False)["top_logprobs"] is None


def test_parts_of_characters_do_not_hide_each_other() -> None:
    pieces = [piece(HALF, "", {HALF: -0.5, OTHER_HALF: -1.0}), piece(OTHER_HALF, "你")]
    written = completion_logprobs(tokens(), pieces, 0, True)
    assert written["tokens"] == ["bytes:\\xe4", "bytes:\\xbd\\xa0"]
    assert written["top_logprobs"][0] == {"bytes:\\xe4": -0.5, "bytes:\\xbd\\xa0": -1.0}
    assert written["text_offset"] == [0, 0]


def test_of_two_tokens_with_one_text_the_likelier_one_is_shown() -> None:
    vocabulary = Vocabulary(list, {AB: b"ab", C: b"ab"}, {})  # type: ignore[arg-type]
    doubled = AnswerTokens(vocabulary, {}, None, continued=False, strips=False)
    written = completion_logprobs(doubled, [piece(C, "ab", {AB: -0.25, C: -0.5})], 0, True)
    assert written["top_logprobs"] == [{"ab": -0.25}]


def test_the_first_token_of_a_prompt_has_nothing_before_it() -> None:
    known = (None, Logprob(C, -0.5, {AB: -0.25}))
    prompt = echoed_logprobs(tokens(), [AB, C], ["ab", "c"], known, True)
    assert prompt == {
        "tokens": ["ab", "c"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"ab": -0.25, "c": -0.5}],
        "text_offset": [0, 2],
    }
    answer = completion_logprobs(tokens(), [piece(C, "c", {AB: -0.25})], 3, True)
    both = joined(prompt, answer)
    assert both["tokens"] == ["ab", "c", "c"]
    assert both["text_offset"] == [0, 2, 3]
    assert joined(None, answer) == answer


def test_without_a_tokenizer_a_prompt_has_numbers_and_no_text() -> None:
    prompt = echoed_logprobs(None, [AB, C], ["", ""], (None, Logprob(C, -0.5, {})), False)
    assert prompt["tokens"] == ["token_id:1", "token_id:2"]
    assert prompt["text_offset"] == [0, 0]
    answer = completion_logprobs(None, [piece(C, "")], 0, False)
    assert joined(prompt, answer)["top_logprobs"] is None


def test_a_piece_without_a_token_moves_the_offset_only() -> None:
    pieces = [piece(C, "c"), Piece("xyz", (), None, ()), piece(C, "c")]
    assert completion_logprobs(tokens(), pieces, 0, False)["text_offset"] == [0, 4]
