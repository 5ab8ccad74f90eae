"""For any generated tokens, the streamed pieces join to the text, without a stop string."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.answer import AnswerCollector, Piece
from glm_multiuser.engine.request import End, Request, Token
from glm_multiuser.sampling import Choice
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.server.events import event
from glm_multiuser.tokenizers import ChatGLMTokenizer, ChatTokenizer
from tests.api.fake_tokenizer import FakeTokenizer
from tests.server.asking import answer_alone, long_prompts, post
from tests.server.in_process import MODEL, InProcessServer, in_process_server
from tests.server.process import ROOT


@cache
def tokenizers() -> dict[str, ChatTokenizer]:
    """All that a server can have here."""
    return {
        "glm-tiny": ChatGLMTokenizer.from_folder(ROOT / "ckpt" / "glm-tiny"),
        "fake": FakeTokenizer(),
    }


def pieces_of(tokenizer: ChatTokenizer, ids: Sequence[int], **params: Any) -> list[Piece]:
    """What is sent for an answer of these tokens."""
    request = Request(
        [1],
        SamplingParams(**params),
        "me",
        (),
        len(ids) + 1,
        tokenizer.vocab_size,
        lambda end: None,
    )
    answer, pieces = AnswerCollector(request, tokenizer), []
    for token_id in ids:
        pieces.append(answer.take(Token(Choice(token_id, None, None), 1.0)))
        if pieces[-1].finish_reason is not None:
            break
    else:
        pieces.append(answer.take(End("length", None, 0.0, 1.0)))
    assert answer.result is not None
    assert answer.result.text == "".join(piece.text for piece in pieces)
    return pieces


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [len(one) for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(found)]
    return text


def ids_of(tokenizer: ChatTokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, and those of texts that are hard to cut."""
    texts = ["你好, it 's 😀 𠮷", "👨‍👩‍👧é\u2028", "  \n\t a", "n't 've . ,", "问:答"]
    real = [tokenizer.encode(text) for text in texts]
    part = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1).map(lambda one: [one]),
        st.sampled_from(real),
        st.sampled_from([[one] for some in real for one in some]),
    )
    return st.lists(part, max_size=16).map(lambda some: [one for ids in some for one in ids])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm-tiny", "fake"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_pieces_join_to_the_text_and_no_stop_string_leaks(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers()[name]
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(ids)
    assert "".join(piece.text for piece in pieces_of(tokenizer, ids)) == whole
    places = st.integers(0, max(0, len(whole) - 1))
    stop = data.draw(
        st.lists(
            st.one_of(
                st.text("abc你 .", min_size=1, max_size=3),
                st.builds(lambda at, length: whole[at : at + length], places, st.integers(1, 6)),
            ).filter(bool),
            max_size=3,
        )
    )
    pieces = pieces_of(tokenizer, ids, stop=stop)
    expected = cut(whole, stop)
    assert "".join(piece.text for piece in pieces) == expected
    # No half character goes out that the text does not have, and nothing goes out to be taken back.
    assert sum(piece.text.count("\ufffd") for piece in pieces) == expected.count("\ufffd")
    assert pieces[-1].finish_reason == (
        "stop" if expected != whole or _ends(whole, stop) else "length"
    )


def _ends(whole: str, stop: Sequence[str]) -> bool:
    return any(one in whole for one in stop)


@pytest.mark.parametrize("name", ["glm-tiny", "fake"])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_piece_is_inside_a_character_where_the_next_one_completes_it(
    name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers()[name]
    ids = tokenizer.encode(data.draw(st.text("你好😀𠮷é a", min_size=1, max_size=8)))
    pieces = pieces_of(tokenizer, ids)[:-1]
    detokenizer = tokenizer.detokenizer()
    for piece, token_id in zip(pieces, ids):
        detokenizer.push([token_id])
        assert piece.inside_character is detokenizer.inside_character
    if name == "glm-tiny":
        assert not pieces[-1].inside_character  # of a text that is whole
        assert not any("\ufffd" in piece.text for piece in pieces)


@settings(deadline=None)
@given(text=st.text(), number=st.integers(0, 9))
def test_any_text_is_one_event(text: str, number: int) -> None:
    content = event({"delta": text, "number": number})
    assert content.startswith(b"data: ")
    assert content.endswith(b"\n\n")
    body = content[len(b"data: ") : -2].decode("ascii")
    assert len(body.splitlines()) == 1
    assert json.loads(body) == {"delta": text, "number": number}


@pytest.fixture(scope="module")
def shared() -> Iterator[InProcessServer]:
    with in_process_server() as server:
        yield server


def test_a_stream_says_once_whether_the_connection_ends(shared: InProcessServer) -> None:
    body = {"prompt": "ab", "stream": True}
    assert "connection" not in post(shared, "/", body).headers
    closed = post(shared, "/", body, connection="close")
    assert closed.headers.get_list("connection") == ["close"]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_no_stop_string_leaks_over_http(shared: InProcessServer, data: st.DataObject) -> None:
    prompt = data.draw(st.sampled_from(long_prompts(5)))
    whole = answer_alone(prompt)
    places, lengths = st.integers(0, len(whole) - 1), st.integers(1, 12)
    part = st.builds(lambda at, length: whole[at : at + length], places, lengths)
    stop = data.draw(st.lists(part, min_size=1, max_size=4))
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stop": stop}
    answer = post(shared, "/v1/chat/completions", body).json()["choices"][0]
    streamed = post(shared, "/v1/chat/completions", {**body, "stream": True}).text
    events = [line[6:] for line in streamed.split("\n") if line.startswith("data: {")]
    choices = [choice for one in events for choice in json.loads(one)["choices"]]
    deltas = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(deltas) == answer["message"]["content"] == cut(whole, stop)
    assert answer["finish_reason"] == choices[-1]["finish_reason"] == "stop"
