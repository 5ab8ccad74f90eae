"""`generation_config.json` as defaults of the sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.checkpoint import read_end_ids, read_generation_defaults
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import write_json


def read(folder: Path, values: Any) -> dict[str, Any]:
    write_json(folder / "generation_config.json", values)
    return read_generation_defaults(folder)


def test_no_file(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}


def test_known_keys(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.95,
            "top_k": 50,
            "top_p": 1,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "max_new_tokens": 64,
            "eos_token_id": 130005,
            "transformers_version": "4.23.1",
        },
    )
    assert found == {
        "temperature": 0.95,
        "top_k": 50,
        "top_p": 1,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
    }


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7}, {"temperature": None}])
def test_no_sampling_is_greedy(tmp_path: Path, values: dict[str, Any]) -> None:
    assert read(tmp_path, {"do_sample": False, **values}) == {"temperature": 0.0}


def test_ends(tmp_path: Path) -> None:
    assert read_end_ids(tmp_path, 10) == ()
    for value, expected in ((None, ()), (2, (2,)), ([7, 9], (7, 9))):
        write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
        assert read_end_ids(tmp_path, 10) == expected
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is \[7, 9\]"):
        read_end_ids(tmp_path, 9)


def test_null_is_not_set(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": None, "top_k": None}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_sample", 0),
        ("do_sample", "false"),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_k", 5.0),
        ("top_k", True),
        ("top_p", [0.9]),
        ("min_p", "0.1"),
        ("repetition_penalty", {}),
        ("max_new_tokens", 1.5),
    ],
)
def test_wrong_type(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} in .*generation_config.json is"):
        read(tmp_path, {key: value})


def test_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds list, not a JSON object"):
        read(tmp_path, [])


def test_not_readable(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_generation_defaults(tmp_path)
