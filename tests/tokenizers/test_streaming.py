"""Incremental detokenisation: the deltas are the decoded text, and each is final."""

from __future__ import annotations

import codecs
from functools import cache, reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.tokenizers import ChatTokenizer, IncrementalDetokenizer
from glm_multiuser.tokenizers.chatglm_6b import CLEAN_UP
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE

MOST_HELD_BACK = 3 + sum(len(old) - 1 for old, _ in CLEAN_UP)
"""Characters that may wait: three bytes, and the beginning of every clean-up pattern."""


def one_byte(token_id: int) -> bytes:
    """The plainest vocabulary: every id is a byte."""
    return bytes([token_id])


@cache
def ids_of_bytes(tokenizer: ChatTokenizer) -> dict[bytes, int]:
    """The id of each single byte, of which any vocabulary has one."""
    ids = {tokenizer.token_bytes(one): one for one in reversed(range(tokenizer.vocab_size))}
    return {bytes([byte]): ids[bytes([byte])] for byte in range(256)}


def draw_ids(data: st.DataObject, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of real text mixed with any ids: bytes, spaces, special and unknown ones."""
    texts = [
        "n't 've ' 's . ,",
        "  \n\t",
        "👨‍👩‍👧 𠮷野",
        "你好, it 's",
        "�",
        "<n><sop>",
        "<|user|>",
    ]
    bytes_ids = ids_of_bytes(tokenizer)
    parts = st.one_of(
        st.integers(-1, tokenizer.vocab_size + 3).map(lambda one: [one]),
        st.integers(tokenizer.vocab_size - 20, tokenizer.vocab_size).map(lambda one: [one]),
        st.sampled_from([[one] for text in texts for one in tokenizer.encode(text)]),
        st.sampled_from([tokenizer.encode(text) for text in texts]),
        st.binary(max_size=4).map(lambda some: [bytes_ids[bytes([one])] for one in some]),
    )
    return [one for part in data.draw(st.lists(parts, max_size=20)) for one in part]


def draw_splits(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    marks = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)).map(sorted))
    return [ids[start:end] for start, end in zip([0, *marks], [*marks, len(ids)])]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_deltas_join_to_the_decoded_text(any_tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    ids = draw_ids(data, any_tokenizer)
    detokenizer = any_tokenizer.detokenizer()
    deltas = [detokenizer.push(part) for part in draw_splits(data, ids)]
    assert "".join(deltas) + detokenizer.flush() == any_tokenizer.decode(ids)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_delta_is_final_and_little_waits(
    any_tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    ids = draw_ids(data, any_tokenizer)
    detokenizer = any_tokenizer.detokenizer()
    sent = ""
    for end in range(len(ids)):
        sent += detokenizer.push(ids[end : end + 1])
        shown = any_tokenizer.decode(ids[: end + 1])
        assert shown.startswith(sent)
        assert len(shown) - len(sent) <= MOST_HELD_BACK
    assert any_tokenizer.decode(ids).startswith(sent)


@settings(deadline=None, max_examples=40)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_no_character_is_split(any_tokenizer: ChatTokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    detokenizer = any_tokenizer.detokenizer()
    deltas = [*(detokenizer.push([one]) for one in ids), detokenizer.flush()]
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_emoji_of_byte_pieces_comes_in_one_delta(any_tokenizer: ChatTokenizer) -> None:
    bytes_ids = ids_of_bytes(any_tokenizer)
    detokenizer = any_tokenizer.detokenizer()
    deltas = [detokenizer.push([bytes_ids[bytes([byte])]]) for byte in "😀!".encode()]
    assert deltas == ["", "", "", "😀", "!"]
    assert "".join(deltas) + detokenizer.flush() == "😀!"


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(one_byte, errors=BYTE_BY_BYTE)
    assert detokenizer.push("好".encode()[:2]) == ""
    assert detokenizer.flush() == "\ufffd\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_can_never_be_a_character_do_not_wait() -> None:
    detokenizer = IncrementalDetokenizer(one_byte, errors=BYTE_BY_BYTE)
    assert [detokenizer.push([0x80]) for _ in range(5)] == ["\ufffd"] * 5
    assert detokenizer.push([0xE5, 0xA5]) == ""
    assert detokenizer.push([0x41]) == "\ufffd\ufffdA"


@given(content=st.lists(st.one_of(st.binary(max_size=3), st.text().map(str.encode))).map(b"".join))
def test_bytes_that_are_no_text_become_one_sign_each(content: bytes) -> None:
    expected = ""
    start = 0
    while start < len(content):
        for end in range(start + 1, start + 5):
            try:
                expected += content[start:end].decode("utf-8")
            except UnicodeDecodeError:
                continue
            break
        else:
            expected += "\ufffd"
            end = start + 1
        start = end
    assert content.decode("utf-8", BYTE_BY_BYTE) == expected


def test_the_error_handler_is_for_decoding_only() -> None:
    with pytest.raises(UnicodeEncodeError):
        codecs.encode("\ud800", "utf-8", BYTE_BY_BYTE)


@given(pieces=st.lists(st.text(" .,?!'ntmsver", max_size=4), max_size=20))
def test_clean_up_is_str_replace_in_order(pieces: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(one_byte, replacements=CLEAN_UP)
    cleaned = "".join(detokenizer.push(piece.encode()) for piece in pieces) + detokenizer.flush()
    assert cleaned == reduce(lambda text, pair: text.replace(*pair), CLEAN_UP, "".join(pieces))


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    replacements=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=4), st.text("ab", max_size=3)), max_size=3
    ),
)
def test_any_replacements(pieces: list[str], replacements: list[tuple[str, str]]) -> None:
    detokenizer = IncrementalDetokenizer(one_byte, replacements=replacements)
    changed = "".join(detokenizer.push(piece.encode()) for piece in pieces) + detokenizer.flush()
    assert changed == reduce(lambda text, pair: text.replace(*pair), replacements, "".join(pieces))


def test_every_id_is_looked_at_once() -> None:
    seen: list[int] = []

    def counted(token_id: int) -> bytes:
        seen.append(token_id)
        return b"x"

    detokenizer = IncrementalDetokenizer(counted, replacements=CLEAN_UP)
    for token_id in range(10_000):
        assert detokenizer.push([token_id]) == "x"
    assert detokenizer.flush() == ""
    assert seen == list(range(10_000))


def test_users_do_not_share_a_detokenizer(any_tokenizer: ChatTokenizer) -> None:
    first_ids = any_tokenizer.encode("hello 世界👋 it 's me")
    second_ids = any_tokenizer.encode("👋 the other one")
    first, second = any_tokenizer.detokenizer(), any_tokenizer.detokenizer()
    texts = ["", ""]
    for place in range(max(len(first_ids), len(second_ids))):
        texts[0] += first.push(first_ids[place : place + 1])
        texts[1] += second.push(second_ids[place : place + 1])
    assert texts[0] + first.flush() == any_tokenizer.decode(first_ids)
    assert texts[1] + second.flush() == any_tokenizer.decode(second_ids)
