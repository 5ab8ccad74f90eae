"""The memory that a model takes, computed beforehand, is the memory that it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors import safe_open

from glm_multiuser import EngineConfig, ModelConfig, memory
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.pages import SIZE as PAGE
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.cli.published import PUBLISHED
from glm_multiuser.config import MOST_USERS
from glm_multiuser.device import PROCESS_BYTES, cores
from glm_multiuser.memory import cache_bytes_per_user, weight_count
from glm_multiuser.model_config import AnyModelConfig, CausalConfig

FOLDER = Path(__file__).resolve().parents[2] / "ckpt" / "glm-tiny"
CHATGLM_6B = PUBLISHED["chatglm-6b"]
CHATGLM3_6B = cast(CausalConfig, PUBLISHED["chatglm3-6b"])
QWEN2_HALF_B = PUBLISHED["qwen2-0.5b"]
LLAMA_3_8B = CausalConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    inner_hidden_size=14336,
    max_sequence_length=8192,
    eos_token_ids=(128001,),
    rotary_dim=128,
    qkv_bias=False,
)
QWEN3_8B = replace(
    LLAMA_3_8B,
    family="qwen3",
    vocab_size=151936,
    num_layers=36,
    inner_hidden_size=12288,
    query_key_norm=True,
)
GLM4_9B_0414 = replace(
    CHATGLM3_6B,
    family="glm4_0414",
    vocab_size=151552,
    num_layers=40,
    norm_position="both",
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
    # The number of parameters that the model cards give: 6.24, 0.49, 8.03, 8.19, 9.4 billion.
    assert weight_count(CHATGLM3_6B) == 6_243_584_000
    assert weight_count(QWEN2_HALF_B) == 494_032_768
    assert weight_count(LLAMA_3_8B) == 8_030_261_248
    assert weight_count(QWEN3_8B) == 8_190_735_360
    assert weight_count(GLM4_9B_0414) == 9_400_279_040
    assert cache_bytes_per_user(CHATGLM3_6B, 1, "float16") == 28 * 1024
    assert cache_bytes_per_user(QWEN2_HALF_B, 1, "float16") == 12 * 1024
    assert cache_bytes_per_user(LLAMA_3_8B, 1, "float16") == 128 * 1024
    assert cache_bytes_per_user(CHATGLM3_6B, 512, "float32") == 512 * 56 * 1024
    assert cache_bytes_per_user(CHATGLM3_6B, 1, "bfloat16") == 28 * 1024
    assert cache_bytes_per_user(CHATGLM3_6B, 1, "int8") == 2 * 28 * 2 * (128 + 4)


def test_more_users_and_longer_ones_take_more() -> None:
    def total(users: int, seq_length: int, dtype: str = "float16") -> int:
        engine = EngineConfig(users, seq_length, dtype=dtype, kernels="portable")
        return memory.total_bytes(CHATGLM_6B, engine)

    one_more = total(9, 512) - total(8, 512)
    assert one_more == cache_bytes_per_user(CHATGLM_6B, 512, "float16")
    assert total(8, 1024) > total(8, 512)
    assert total(8, 512, "float32") == 2 * total(8, 512)


def test_zeros_are_one_block_of_each_length() -> None:
    def zeros(seq_length: int) -> int:
        engine = EngineConfig(seq_length=seq_length, dtype="float16", kernels="portable")
        return memory.zeros_bytes(CHATGLM_6B, engine)

    for seq_length, positions in ((100, 100), (256, 256), (300, 300), (1024, 256), (1000, 488)):
        assert zeros(seq_length) == positions * 448 * 1024


def test_native_kernels_pack_weights_and_fill_keys_up_to_tiles() -> None:
    reason = library.unavailable_reason("CPU")
    if reason:
        pytest.skip(reason)
    engine = EngineConfig(
        seq_length=1000, kernels="native", weight_dtype="int8", cache_dtype="float32"
    )
    count = weight_count(CHATGLM_6B)
    assert count < memory.weight_bytes(CHATGLM_6B, engine) < 1.01 * count
    assert memory.zeros_bytes(CHATGLM_6B, engine) == 0
    keys, values = 1008, 1000
    # 28 layers of 32 heads of 128 numbers, each in whole pages; with int8 a scale of 4 bytes each.
    for cache, per_head in (("float32", 512), (None, 256), ("bfloat16", 256), ("int8", 132)):
        pages = [math.ceil(positions * per_head / PAGE) for positions in (keys, values)]
        one = replace(engine, cache_dtype=cache)
        assert memory.user_bytes(CHATGLM_6B, one) == 28 * 32 * sum(pages) * PAGE


@pytest.mark.parametrize("config", [CHATGLM_6B, QWEN2_HALF_B])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_take_two_bytes(config: AnyModelConfig, dtype: str) -> None:
    reason = library.unavailable_reason("CPU")
    if reason:
        pytest.skip(reason)
    full = EngineConfig(kernels="native", weight_dtype="float32")
    half = replace(full, weight_dtype=dtype)
    vectors = sum(math.prod(one) for one in parameter_shapes(config).values() if len(one) == 1)
    saved = memory.weight_bytes(config, full) - memory.weight_bytes(config, half)
    assert saved == 2 * (weight_count(config) - vectors)
    read = memory.weight_bytes_read(config, full) / memory.weight_bytes_read(config, half)
    assert 1.99 < read <= 2
    # Blocks that are on their way in.
    loading = memory.loading_bytes(config, half) - memory.weight_bytes(config, half)
    assert 0 < loading - PROCESS_BYTES["CPU"] <= cores() * 2**24


def test_an_embedding_is_not_read_as_a_whole_unless_it_is_the_output_layer() -> None:
    engine = EngineConfig(dtype="float16", kernels="portable")
    for config, tables in ((CHATGLM_6B, 1), (CHATGLM3_6B, 1), (QWEN2_HALF_B, 0)):
        unread = memory.weight_bytes(config, engine) - memory.weight_bytes_read(config, engine)
        assert unread == tables * 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("config", [CHATGLM_6B, CHATGLM3_6B, QWEN2_HALF_B, QWEN3_8B, GLM4_9B_0414])
def test_one_more_user_would_not_fit(config: AnyModelConfig) -> None:
    engine = EngineConfig(seq_length=1024, dtype="float16", device_target="Ascend")

    def needed(users: int) -> int:
        one = replace(engine, users=users)
        return memory.total_bytes(config, one) + memory.workspace_bytes(config, one)

    for users in (1, 3, 40):
        assert memory.users_that_fit(config, engine, needed(users)) == users
        assert memory.users_that_fit(config, engine, needed(users) - 1) == users - 1
    assert memory.users_that_fit(config, engine, 2**50) == MOST_USERS
