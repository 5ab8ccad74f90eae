"""Finding GGUF files, and the tensors and metadata in them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from glm_multiuser.checkpoint.gguf.file import open_gguf
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import same
from tests.checkpoint.gguf_content import Content, Tensor, gguf_model, load_all
from tests.golden_data import golden_folder

SPLIT = "model-{:05}-of-00003.gguf"
Change = Callable[[Content], object]


@pytest.fixture
def content() -> Content:
    return Content.of(gguf_model("qwen2.Q8_0"))


@pytest.fixture
def parts(content: Content, tmp_path: Path) -> list[Content]:
    """The metadata in the first one only, the tensors in all three."""
    numbers = [{"split.no": (2, struct.pack("<H", one)), "split.count": 3} for one in range(3)]
    numbers[0].update({**content.metadata, "split.tensors.count": len(content.tensors)})
    return [Content(numbers[one], content.tensors[one::3]) for one in range(3)]


def write(parts: list[Content], folder: Path) -> Path:
    for number, one in enumerate(parts, 1):
        one.write(folder / SPLIT.format(number))
    return folder / SPLIT.format(1)


def test_types_of_all_reference_models() -> None:
    folder = golden_folder("gguf_models")
    files = json.loads((folder / "expected.json").read_text("utf-8"))["files"]
    assert len(files) == 17
    for name, expected in files.items():
        found = open_gguf(folder / name)
        assert {one.name: one.dtype for one in found.tensors.values()} == expected["tensors"]
        assert found.metadata["general.architecture"] == expected["architecture"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "whole": 7,
        "negative": -7,
        "number": 0.1,
        "switch": True,
        "text": "中文",
        "texts": ["a", "", "é"],
        "large": (10, struct.pack("<Q", 1 << 40)),
        "exact": (12, struct.pack("<d", 0.1)),
    }
    array = np.arange(6, dtype="<f4")
    tensor = Tensor("t", 0, (2, 3), array.tobytes())
    path = Content({**values, "array": array}, [tensor]).write(tmp_path / "a.gguf")
    found = open_gguf(path)
    np.testing.assert_array_equal(found.metadata.pop("array"), array)
    assert found.metadata.pop("texts").read() == values.pop("texts")
    assert found.metadata == {**values, "large": 1 << 40, "exact": 0.1}
    np.testing.assert_array_equal(found.tensors["t"].read(), array.reshape(2, 3))


class TestWhere:
    def test_parts_are_read_as_one_file(self, parts: list[Content], tmp_path: Path) -> None:
        whole = load_all(gguf_model("qwen2.Q8_0"))
        first = write(parts, tmp_path)
        for place in (first, tmp_path / SPLIT.format(3), tmp_path):
            assert same(load_all(place), whole)

    def test_a_folder_or_a_file_of_any_name(self, tmp_path: Path) -> None:
        model = gguf_model("qwen2.F32")
        (tmp_path / "x").mkdir()
        for link in ("model.gguf", "x/sha256-1234"):
            (tmp_path / link).symlink_to(model)
        for place in (tmp_path, tmp_path / "x" / "sha256-1234"):
            assert same(load_all(place), load_all(model))

    def test_several_models_in_a_folder(self, tmp_path: Path) -> None:
        for name in ("qwen2.F32.gguf", "qwen2.Q8_0.gguf"):
            (tmp_path / name).symlink_to(gguf_model(name[:-5]))
        with pytest.raises(CheckpointError, match=r"qwen2\.F32\.gguf, qwen2\.Q8_0\.gguf; name one"):
            load_all(tmp_path)

    def test_other_weights_of_a_folder_come_first(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").symlink_to(gguf_model("qwen2.F32"))
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(golden_folder("llama_tied") / name)
        assert same(load_all(tmp_path), load_all(golden_folder("llama_tied")))

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"cannot read .*missing\.gguf: No such file"):
            load_all(tmp_path / "missing.gguf")

    def test_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.gguf")
        with pytest.raises(CheckpointError, match="is no regular file"):
            load_all(tmp_path / "a.gguf")


class TestParts:
    def test_one_is_missing(self, parts: list[Content], tmp_path: Path) -> None:
        first = write(parts[:2], tmp_path)
        with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf: No such file"):
            load_all(first)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda parts: parts.reverse(), "has split.no 2 and split.count 3; by its name"),
            (lambda parts: parts[1].metadata.update({"split.count": 4}), "split.no 1 and .* 4"),
            (lambda parts: parts[1].metadata.update({"split.no": "1"}), "split.no .* is '1'"),
            (lambda parts: parts[2].tensors.pop(), "split.tensors.count of .* is 26; its parts"),
            (
                lambda parts: parts[1].tensors.append(parts[0].tensors[0]),
                "token_embd.weight is both in",
            ),
        ],
    )
    def test_that_do_not_belong_together(
        self, parts: list[Content], tmp_path: Path, change: Any, message: str
    ) -> None:
        change(parts)
        first = write(parts, tmp_path)
        with pytest.raises(CheckpointError, match=message):
            open_gguf(first)

    def test_under_another_name(self, parts: list[Content], tmp_path: Path) -> None:
        path = parts[0].write(tmp_path / "model.gguf")
        with pytest.raises(CheckpointError, match=r"has split\.no 0 and split\.count 3"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("kind", "name"), [(16, "IQ2_XXS"), (28, "F64"), (39, "MXFP4"), (999, "type 999")]
)
def test_types_that_are_not_read(content: Content, tmp_path: Path, kind: int, name: str) -> None:
    content.tensor("blk.1.ffn_up.weight").kind = kind
    path = content.write(tmp_path / "a.gguf")
    with pytest.raises(
        CheckpointError, match=f"blk.1.ffn_up.weight in .* is stored as {name}; F32"
    ):
        load_all(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.metadata.update({"x": (99, b"")}), "x has the unknown type 99"),
        (
            lambda one: one.metadata.update({"x": (9, struct.pack("<IQ", 9, 1))}),
            "array of the type 9",
        ),
        (
            lambda one: one.metadata.update({"x": (9, struct.pack("<IQ", 5, 1 << 60))}),
            "numbers goes beyond its end",
        ),
        (
            lambda one: one.metadata.update({"x": (9, struct.pack("<IQ", 8, 1 << 60))}),
            "number of strings of x is 1152921504606846976; it must be at most",
        ),
        (
            lambda one: one.metadata.update({"x": (8, struct.pack("<Q", 1 << 60))}),
            "the length of a string is",
        ),
        (lambda one: one.metadata.update({"general.alignment": 24}), "must be a power of two"),
        (lambda one: one.tensors.append(one.tensors[0]), "token_embd.weight is there twice"),
        (lambda one: setattr(one.tensors[0], "shape", (1,) * 5), "number of dimensions .* is 5"),
        (lambda one: setattr(one.tensors[0], "shape", (320, 33)), "needs a multiple of 32"),
        (lambda one: setattr(one.tensors[0], "shape", (640, 32)), "overlap"),
        (lambda one: setattr(one.tensors[0], "shape", (1 << 62, 1 << 62)), "of the data, which"),
    ],
)
def test_broken_files(content: Content, tmp_path: Path, change: Change, message: str) -> None:
    change(content)
    path = content.write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("begin", "content", "message"),
    [
        (0, b"GGML", "is no GGUF file"),
        (4, b"\1\0\0\0", "has version 1; "),
        (4, b"\0\0\0\3", "in the byte order of another machine"),
        (8, b"\xff" * 8, "the number of tensors is 18446744073709551615"),
    ],
)
def test_the_first_bytes(tmp_path: Path, begin: int, content: bytes, message: str) -> None:
    data = bytearray(gguf_model("qwen2.Q8_0").read_bytes())
    data[begin : begin + len(content)] = content
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)
