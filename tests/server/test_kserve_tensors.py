"""The tensor codec: round trips, the official client's codec, and malformed data."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
import zlib
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.kserve.infer_bodies import Input
from glm_multiuser.server.kserve.infer_codec import decompress, read_inputs, split
from glm_multiuser.server.kserve.questions import rows_of
from glm_multiuser.server.kserve.tensors import from_binary, from_json, to_binary

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=8)
INT16 = st.lists(st.integers(-(2**15), 2**15 - 1), max_size=8)


@given(TEXTS)
def test_texts_survive_the_binary_form(texts: list[str]) -> None:
    assert from_binary("prompt", "BYTES", to_binary(texts)) == texts


@given(TEXTS)
def test_the_official_client_reads_what_is_written(texts: list[str]) -> None:
    read = deserialize_bytes_tensor(to_binary(texts))
    assert [one.decode() for one in read] == texts


@given(TEXTS)
def test_what_the_official_client_writes_is_read(texts: list[str]) -> None:
    written = serialize_byte_tensor(np.array(texts, np.object_))
    data = written.item() if written.size else b""
    assert from_binary("prompt", "BYTES", data) == texts


@given(INT16)
def test_numbers_survive_both_forms(numbers: list[int]) -> None:
    assert from_binary("history_len", "INT16", np.array(numbers, "<i2").tobytes()) == numbers
    assert from_json("history_len", "INT16", json.loads(json.dumps(numbers))) == numbers


@given(TEXTS)
def test_texts_survive_json(texts: list[str]) -> None:
    assert from_json("prompt", "BYTES", texts) == texts
    assert from_json("prompt", "BYTES", [[text] for text in texts]) == texts


@given(st.sampled_from(["BYTES", "INT16"]), st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(datatype: str, data: bytes) -> None:
    elements: list[Any] = []
    errors: list[tuple[int, Optional[str]]] = []
    try:
        elements = from_binary("prompt", datatype, data)
    except APIError as error:
        errors = [(error.status, error.field)]
    assert errors in ([], [(400, "prompt")])
    assert {type(one) for one in elements} <= {str if datatype == "BYTES" else int}


def test_the_two_forms_on_the_wire() -> None:
    assert to_binary(["你", ""]) == b"\x03\x00\x00\x00\xe4\xbd\xa0" + bytes(4)
    assert from_binary("history_len", "INT16", b"\x01\x00\xff\xff\x00\x80") == [1, -1, -(2**15)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x00\x00\x00", "ends inside the length"),
        (b"\x05\x00\x00\x00abcd", "of 5 bytes at byte 4; 4 are left"),
        (b"\xff\xff\xff\xffabcd", "of 4294967295 bytes at byte 4; 4 are left"),
        (b"\x01\x00\x00\x00a\x00", "ends inside the length of an element, at byte 5"),
        (b"\x02\x00\x00\x00\xff\xff", "no UTF-8"),
        (b"\x03\x00\x00\x00\xed\xa0\x80", "no UTF-8"),
    ],
)
def test_texts_that_lie(data: bytes, problem: str) -> None:
    with pytest.raises(APIError, match=problem) as caught:
        from_binary("history", "BYTES", data)
    assert caught.value.status == 400
    assert caught.value.field == "history"


def test_half_a_number() -> None:
    with pytest.raises(APIError, match="history_len has 3 bytes; INT16 elements have 2 each"):
        from_binary("history_len", "INT16", b"abc")


@pytest.mark.parametrize(
    ("datatype", "element", "limit"),
    [
        ("BYTES", 5, "must hold strings"),
        ("BYTES", None, "must hold strings"),
        ("BYTES", {"a": 1}, "must hold strings"),
        ("INT16", "5", "whole numbers from -32768 to 32767"),
        ("INT16", 2**15, "whole numbers from -32768 to 32767"),
        ("INT16", -(2**15) - 1, "whole numbers from -32768 to 32767"),
        ("INT16", 1.0, "whole numbers"),
        ("INT16", True, "whole numbers"),
    ],
)
def test_elements_of_another_type(datatype: str, element: Any, limit: str) -> None:
    good: Any = "a" if datatype == "BYTES" else 1
    with pytest.raises(APIError) as caught:
        from_json("prompt", datatype, [good, element])
    assert f"prompt has {element!r} at place 1" in str(caught.value)
    assert limit in str(caught.value)


def test_a_long_element_is_not_repeated_in_the_message() -> None:
    with pytest.raises(APIError) as caught:
        from_json("prompt", "BYTES", [{"a": "x" * 10_000}])
    assert len(str(caught.value)) < 200


# A whole body.


def one(
    name: str = "prompt",
    shape: Sequence[int] = (1, 1),
    datatype: str = "BYTES",
    data: Optional[list[Any]] = None,
    **parameters: Any,
) -> Input:
    """An input as it stands in the JSON."""
    fields = {"name": name, "shape": list(shape), "datatype": datatype, "data": data}
    return Input.model_validate({**fields, "parameters": parameters})


def binary(name: str, size: int, shape: Sequence[int] = (1, 1), datatype: str = "BYTES") -> Input:
    return one(name, shape, datatype, binary_data_size=size)


def test_inputs_in_both_forms_and_any_order() -> None:
    prompts, lengths = to_binary(["a", "b"]), struct.pack("<2h", 1, 0)
    inputs = [
        binary("history_len", len(lengths), [2, 1], "INT16"),
        one("temperature", [2], data=["0", ""]),
        binary("prompt", len(prompts), [2, 1]),
    ]
    elements, shape = read_inputs(inputs, lengths + prompts, 8)
    assert elements == {"history_len": [1, 0], "temperature": ["0", ""], "prompt": ["a", "b"]}
    assert shape == [2, 1]
    assert list(rows_of(elements)) == [
        {"history_len": 1, "temperature": "0", "prompt": "a"},
        {"history_len": 0, "prompt": "b"},
    ]


def test_an_empty_prompt_is_a_prompt() -> None:
    assert list(rows_of({"prompt": [""], "history": [""]})) == [{"prompt": ""}]


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_outputs_have_the_shape_of_the_prompt(shape: list[int]) -> None:
    assert read_inputs([one("prompt", shape, data=["a", "b", "c"])], b"", 3)[1] == shape


PROMPT = to_binary(["a"])
WRONG: dict[str, tuple[list[Input], bytes, str]] = {
    "size beyond the body": (
        [binary("prompt", 6)],
        PROMPT,
        "prompt has binary_data_size 6; 5 bytes are left",
    ),
    "size of the second beyond the body": (
        [binary("prompt", 5), binary("history", 1)],
        PROMPT,
        "history has binary_data_size 1; 0 bytes are left",
    ),
    "bytes of nobody": (
        [binary("prompt", 5)],
        PROMPT + b"x",
        "body has 1 bytes that belong to no input",
    ),
    "two elements for one": (
        [binary("prompt", 10)],
        PROMPT * 2,
        r"prompt has shape \[1, 1\] and 2 elements",
    ),
    "one element for two": (
        [binary("prompt", 5, [2, 1])],
        PROMPT,
        r"prompt has shape \[2, 1\] and 1 elements",
    ),
    "empty": (
        [binary("prompt", 0, [0, 1])],
        b"",
        r"prompt has shape \[0, 1\]; it must be \[N, 1\] or \[N\], N from 1 to 2",
    ),
    "too many": ([one("prompt", [3, 1], data=["a"] * 3)], b"", "N from 1 to 2"),
    "two columns": ([one("prompt", [1, 2], data=["a", "b"])], b"", "N from 1 to 2"),
    "three dimensions": ([one("prompt", [1, 1, 1], data=["a"])], b"", "N from 1 to 2"),
    "no dimension": ([one("prompt", [], data=["a"])], b"", "N from 1 to 2"),
    "data twice": (
        [one(data=["a"], binary_data_size=5)],
        PROMPT,
        "prompt must have either data or a binary_data_size",
    ),
    "no data": (
        [one()],
        b"",
        "prompt must have either data or a binary_data_size",
    ),
    "unknown": (
        [one("nonsense", [1], data=["a"])],
        b"",
        "nonsense is no input; there are prompt, history, temperature, max_token, history_len",
    ),
    "twice": ([one("prompt", [1], data=["a"])] * 2, b"", "prompt is given twice"),
    "missing": ([one("history", [1], data=["[]"])], b"", "prompt is missing"),
    "another datatype": (
        [one("prompt", [1], "INT16", data=[1])],
        b"",
        "prompt has datatype 'INT16'; it must be 'BYTES'",
    ),
    "another batch": (
        [one("prompt", [1], data=["a"]), one("history", [2], data=["[]", "[]"])],
        b"",
        "history has 2 elements; prompt has 1",
    ),
    "shared memory": (
        [one(shared_memory_region="r")],
        b"",
        "prompt has a shared_memory_region; the client's shared memory is not read",
    ),
}


@pytest.mark.parametrize(("inputs", "data", "problem"), WRONG.values(), ids=WRONG.keys())
def test_inputs_that_are_refused(inputs: list[Input], data: bytes, problem: str) -> None:
    with pytest.raises(APIError, match=problem) as caught:
        read_inputs(inputs, data, 2)
    assert caught.value.status == 400


def test_splitting_a_body() -> None:
    assert split(b"{}", None) == (b"{}", b"")
    assert split(b"{}abc", "2") == (b"{}", b"abc")
    assert split(b"{}", "2") == (b"{}", b"")


@pytest.mark.parametrize("length", ["3", "-1", "+2", "0x2", "", " 2", "2.0", "٢", "9" * 5000])
def test_a_length_of_the_json_that_lies(length: str) -> None:
    with pytest.raises(APIError, match="the body has 2 bytes") as caught:
        split(b"{}", length)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)],
)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_compressed_bodies(encoding: str, compress: Any, size: int) -> None:
    body = b"x" * size
    assert decompress(compress(body), encoding, 1000) == body


@pytest.mark.parametrize("encoding", [None, "", "identity"])
def test_bodies_that_are_not_compressed(encoding: Any) -> None:
    assert decompress(b"abc", encoding, 3) == b"abc"


@pytest.mark.parametrize("size", [1001, 50_000_000])
def test_a_body_that_is_large_when_decompressed_is_not_decompressed(size: int) -> None:
    bomb = zlib.compress(b"x" * size)
    tracemalloc.start()
    try:
        with pytest.raises(APIError, match="more than 1000 bytes") as caught:
            decompress(bomb, "deflate", 1000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413


GZIPPED = gzip.compress(b"{}", mtime=0)
"""Without the time: names of tests have parameters in them, and each process must get the same."""


@pytest.mark.parametrize(
    ("body", "encoding", "problem"),
    [
        (b"{}", "gzip", "body is not gzip"),
        (GZIPPED[:-1], "gzip", "body is not one whole gzip stream"),
        (GZIPPED + b"x", "gzip", "body is not one whole gzip stream"),
        (b"", "deflate", "body is not one whole deflate stream"),
        (b"{}", "br", "Content-Encoding is 'br'; it may be 'gzip' or 'deflate'"),
    ],
)
def test_a_body_that_is_not_compressed_as_it_says(body: bytes, encoding: str, problem: str) -> None:
    with pytest.raises(APIError, match=problem) as caught:
        decompress(body, encoding, 1000)
    assert caught.value.status == 400
