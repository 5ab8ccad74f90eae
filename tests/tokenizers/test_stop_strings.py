"""Stop strings, against a reference that looks at the whole text one character at a time."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers import StopStrings
from glm_multiuser.tokenizers.text import unfinished_match

# Two letters only, so that stop strings repeat, overlap and contain each other.
texts = st.lists(st.text("ab", max_size=6), max_size=8)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stop: list[str]) -> Optional[int]:
    """Where the first stop string to be complete begins, or None."""
    for end in range(len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return min(starts)
    return None


def safe_length(text: str, stop: list[str]) -> int:
    """Characters of a text without stop string that cannot be part of one later."""
    for start in range(len(text) + 1):
        if any(word.startswith(text[start:]) for word in stop):
            return start
    return len(text)


@given(pieces=texts, stop=stop_lists)
def test_against_the_whole_text(pieces: list[str], stop: list[str]) -> None:
    stops = StopStrings(stop)
    sent = ""
    known = ""
    for piece in pieces:
        known += piece
        text, stopped = stops.feed(piece)
        sent += text
        cut = first_stop(known, stop)
        assert stopped == (cut is not None)
        assert sent == (known[: safe_length(known, stop)] if cut is None else known[:cut])
    cut = first_stop(known, stop)
    assert sent + stops.flush() == known[:cut]


@given(pieces=texts, stop=stop_lists, count=st.integers(0, 8))
def test_the_first_pieces_do_not_end_the_answer(
    pieces: list[str], stop: list[str], count: int
) -> None:
    stops = StopStrings(stop)
    found = ""
    for place, piece in enumerate(pieces):
        found += stops.feed(piece, ends=place >= count)[0]
    known = "".join(pieces)
    passed = len("".join(pieces[:count]))
    ends = [
        (end, end - len(word))
        for end in range(passed + 1, len(known) + 1)
        for word in stop
        if known[:end].endswith(word)
    ]
    assert found + stops.flush() == known[: min(ends)[1] if ends else None]
    assert (stops.found is not None) == bool(ends)


@given(text=st.text("ab", max_size=30), stop=stop_lists, data=st.data())
def test_the_split_does_not_matter(text: str, stop: list[str], data: st.DataObject) -> None:
    whole = StopStrings(stop)
    expected, stopped = whole.feed(text)
    expected += whole.flush()
    parts = StopStrings(stop)
    start = 0
    found = ""
    ended = False
    while start < len(text):
        length = data.draw(st.integers(1, len(text) - start))
        piece, ended = parts.feed(text[start : start + length])
        found += piece
        start += length
    assert (found + parts.flush(), ended) == (expected, stopped)


@given(pieces=st.lists(st.text()), stop=st.lists(st.text(min_size=1)))
def test_any_characters(pieces: list[str], stop: list[str]) -> None:
    stops = StopStrings(stop)
    found = "".join(stops.feed(piece)[0] for piece in pieces) + stops.flush()
    assert found == "".join(pieces)[: first_stop("".join(pieces), stop)]


@given(text=st.text("ab", max_size=12), word=st.text("ab", min_size=1, max_size=6))
def test_the_longest_beginning_at_the_end_of_a_text(text: str, word: str) -> None:
    lengths = [length for length in range(len(word)) if text.endswith(word[:length])]
    assert unfinished_match(text, word) == max(lengths)


def test_a_stop_string_that_straddles_pieces() -> None:
    stops = StopStrings(["\nUser:"])
    assert stops.feed("Hello\nUs") == ("Hello", False)
    assert stops.feed("er") == ("", False)
    assert stops.feed(": more") == ("", True)
    assert stops.feed(" and more") == ("", True)
    assert stops.flush() == ""


def test_what_was_held_back_is_sent_when_it_was_no_stop_string() -> None:
    stops = StopStrings(["</end>"])
    assert stops.feed("a </e") == ("a ", False)
    assert stops.feed("m>b<") == ("</em>b", False)
    assert stops.flush() == "<"
    assert stops.flush() == ""


def test_the_first_to_be_complete_wins() -> None:
    assert StopStrings(["world", "lo"]).feed("hello world") == ("hel", True)
    assert StopStrings(["bc", "abcd"]).feed("xabcd") == ("xa", True)
    assert StopStrings(["bc", "abc"]).feed("xabcd") == ("x", True)


def test_without_stop_strings_all_text_passes() -> None:
    stops = StopStrings()
    assert stops.feed("any text") == ("any text", False)
    assert stops.flush() == ""


@pytest.mark.parametrize(
    ("stop", "message"),
    [([""], r"stop\[0\] is ''"), (["a", None], r"stop\[1\] is None"), ("ab", "stop is the string")],
)
def test_what_is_no_stop_string(stop: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        StopStrings(stop)
