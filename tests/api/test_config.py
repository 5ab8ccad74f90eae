"""Settings: what is refused, and that each message names the field, the value and the limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import ConfigError, EngineConfig, ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "inner_hidden_size": 128,
}


def write_config(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("users", 0, "users is 0; it must be between 1 and 1024"),
        ("users", 1025, "users is 1025; it must be between 1 and 1024"),
        ("users", True, "users is True; it must be between 1 and 1024"),
        ("users", 2.0, "users is 2.0; it must be between 1 and 1024"),
        ("users", "8", "users is '8'; it must be between 1 and 1024"),
        ("seq_length", 7, "seq_length is 7; it must be between 8 and 1048576"),
        ("max_queue", -1, "max_queue is -1; it must be between 0 and 1048576"),
        ("max_queue_per_user", 0, "max_queue_per_user is 0; it must be between 1 and 1048576"),
        ("users_per_cell", 0, "users_per_cell is 0; it must be between 1 and 8"),
        ("users_per_cell", 9, "users_per_cell is 9; it must be between 1 and 8"),
        ("users_per_cell", "1", "users_per_cell is '1'; it must be between 1 and 8"),
        ("users_per_cell", 1.5, "users_per_cell is 1.5; it must be between 1 and 8"),
        ("dtype", "bfloat16", "dtype is 'bfloat16'; it must be 'float32' or 'float16'"),
        ("kernels", "fast", "kernels is 'fast'; it must be one of auto, native, portable"),
        (
            "compile_cache_dir",
            "~nobody-here/x",
            "compile_cache_dir is '~nobody-here/x'; there is no such user",
        ),
        (
            "session_dir",
            "a\0b",
            r"session_dir is 'a\x00b'; a name must not have the character NUL",
        ),
        (
            "weight_dtype",
            "int3",
            "weight_dtype is 'int3'; it must be one of float32, bfloat16, float16, int8, int4",
        ),
        (
            "compute_dtype",
            "float16",
            "compute_dtype is 'float16'; it must be one of float32, bfloat16, int8",
        ),
        (
            "cache_dtype",
            "float16",
            "cache_dtype is 'float16'; it must be one of float32, bfloat16, int8",
        ),
        ("device_target", "GPU", "device_target is 'GPU'; it must be 'CPU' or 'Ascend'"),
        ("device_id", -1, "device_id is -1; it must be between 0 and 1024"),
    ],
)
def test_an_engine_setting_out_of_range(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("weight", ["float32", "float16", "bfloat16"])
def test_int8_inputs_are_for_weights_of_8_bits_and_fewer(weight: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(compute_dtype="int8", weight_dtype=weight)
    assert str(caught.value) == (
        "compute_dtype is 'int8'; weight_dtype must be 'int8' or 'int4', or None for a checkpoint "
        f"in groups, not {weight!r}"
    )
    for allowed in (None, "int8", "int4"):
        EngineConfig(compute_dtype="int8", weight_dtype=allowed)


@pytest.mark.parametrize(
    "settings",
    [
        {"users": 1, "seq_length": 8, "max_queue": 0, "max_queue_per_user": 1},
        {"users": 1024, "users_per_cell": 1024},
        {"users_per_cell": 1, "dtype": "float16", "device_target": "Ascend", "device_id": 7},
    ],
)
def test_the_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="users is 0"):
        replace(EngineConfig(), users=0)


@pytest.mark.parametrize("field", [*SHAPE, "max_sequence_length"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "64", None])
def test_a_size_of_the_model_out_of_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**SHAPE, field: value})
    assert str(caught.value) == f"{field} is {value!r}; it must be a whole number of at least 1"


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(
        ConfigError, match="hidden_size 64 cannot be split over num_attention_heads"
    ):
        ModelConfig(**{**SHAPE, "num_attention_heads": 3})


def test_heads_must_leave_room_for_the_rotary_embedding() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads is 2; .* a multiple of 4"):
        ModelConfig(**{**SHAPE, "num_attention_heads": 32})


def test_a_config_json_of_chatglm_6b(tmp_path: Path) -> None:
    values = {
        **SHAPE,
        "model_type": "chatglm",
        "position_encoding_2d": True,
        "eos_token_id": 9,
        "pre_seq_len": None,
    }
    config = ModelConfig.from_folder(write_config(tmp_path, json.dumps(values)))
    assert config == ModelConfig(**SHAPE, eos_token_id=9)
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' .* is not ChatGLM-6B"),
        ({"position_encoding_2d": False}, "with position_encoding_2d False is not ChatGLM-6B"),
        ({"position_encoding_2d": None}, "with position_encoding_2d None is not ChatGLM-6B"),
        ({"vocab_size": None}, "vocab_size is None; it must be a whole number of at least 1"),
    ],
)
def test_a_config_json_that_cannot_work(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = {**SHAPE, "model_type": "chatglm", "position_encoding_2d": True, **changes}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(write_config(tmp_path, json.dumps(values)))


def test_a_config_json_without_a_size(tmp_path: Path) -> None:
    values = {**SHAPE, "position_encoding_2d": True}
    del values["num_layers"]
    with pytest.raises(ConfigError, match=r"lacks a size of the model: .*num_layers"):
        ModelConfig.from_folder(write_config(tmp_path, json.dumps(values)))


def test_a_folder_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json is not JSON"), ("[1]", "holds list, not a JSON object")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(write_config(tmp_path, text))
