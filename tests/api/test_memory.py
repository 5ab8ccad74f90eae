"""The memory that a model takes, computed beforehand, is the memory that it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from glm_multiuser import EngineConfig, ModelConfig
from glm_multiuser.config import CausalConfig
from glm_multiuser.memory import cache_bytes_per_user, total_bytes, weight_count

FOLDER = Path(__file__).resolve().parents[2] / "ckpt" / "glm-tiny"
CHATGLM_6B = ModelConfig(130528, 4096, 28, 32, 16384)

CHATGLM3_6B = CausalConfig(
    family="chatglm",
    vocab_size=65024,
    hidden_size=4096,
    num_layers=28,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    inner_hidden_size=13696,
    max_sequence_length=8192,
    eos_token_ids=(2,),
    rotary_dim=64,
)
QWEN2_HALF_B = CausalConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    num_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    inner_hidden_size=4864,
    max_sequence_length=32768,
    eos_token_ids=(151643,),
    rotary_dim=64,
    tied=True,
)


def test_weights_are_those_of_the_file() -> None:
    with safe_open(str(FOLDER / "model.safetensors"), "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    # Rotary frequencies, where a file has them, are computed and no weights.
    stored = sum(int(np.prod(shape)) for shape in shapes if len(shape) > 1 or shape[0] > 64)
    assert weight_count(ModelConfig.from_folder(FOLDER)) == stored


def test_the_published_model_has_the_published_size() -> None:
    # "6.2 billion parameters" shares the embedding with the output layer; here both are stored.
    assert round(weight_count(CHATGLM_6B) / 1e9, 1) == 6.7
    assert cache_bytes_per_user(CHATGLM_6B, 1, "float16") == 448 * 1024


def test_published_causal_models() -> None:
    # The number of parameters that the model cards give: 6.24 and 0.49 billion.
    assert weight_count(CHATGLM3_6B) == 6_243_584_000
    assert weight_count(QWEN2_HALF_B) == 494_032_768
    assert cache_bytes_per_user(CHATGLM3_6B, 1, "float16") == 28 * 1024
    assert cache_bytes_per_user(QWEN2_HALF_B, 1, "float16") == 12 * 1024
    assert cache_bytes_per_user(CHATGLM3_6B, 512, "float32") == 512 * 56 * 1024


def test_more_users_and_longer_ones_take_more() -> None:
    def total(users: int, seq_length: int, dtype: str = "float16") -> int:
        return total_bytes(CHATGLM_6B, EngineConfig(users, seq_length), dtype)

    one_more = total(9, 512) - total(8, 512)
    assert one_more == cache_bytes_per_user(CHATGLM_6B, 512, "float16")
    assert total(8, 1024) > total(8, 512)
    assert total(8, 512, "float32") == 2 * total(8, 512)
