"""Large JSON: the same text as json.dumps, from parts between which other threads run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_multiuser.server import large_json
from glm_multiuser.server.large_json import LONG, LargeJSONResponse, encode_large

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    LEAVES.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@given(VALUES, st.booleans())
def test_it_is_what_json_dumps_returns(value: object, ensure_ascii: bool) -> None:
    expected = json.dumps(value, ensure_ascii=ensure_ascii, separators=(",", ":"))
    assert encode_large(value, ensure_ascii) == expected


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1, 2 * LONG, 2 * LONG + 1])
def test_lists_around_the_size_of_a_part(size: int) -> None:
    value = {"content": [[number, {"token": "你"}] for number in range(size)]}
    assert json.loads(bytes(LargeJSONResponse(value).body)) == value


def test_no_part_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"token": "a", "logprob": -1.5, "bytes": [97]}
    content = [{**token, "top_logprobs": [token] * 20}] * 2000
    sizes: list[int] = []

    class Watched:
        @staticmethod
        def dumps(value: object, **options: bool) -> str:
            text = json.dumps(value, **options)  # type: ignore[arg-type]
            sizes.append(len(text))
            return text

    monkeypatch.setattr(large_json, "json", Watched)
    text = encode_large({"choices": [{"logprobs": {"content": content}}]})
    assert max(sizes) < len(text) / 20


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_large([float("nan")])
