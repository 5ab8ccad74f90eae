"""The quantised matrices of a GGUF file stay as they are, and answer as the same numbers do in
float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from glm_multiuser import (
    ConfigError,
    EngineConfig,
    MultiUserLLM,
    SamplingParams,
    backend_choice,
    memory,
)
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.packing import Packing
from glm_multiuser.backends.native.quantising import quantise
from glm_multiuser.backends.native.weight_types import types_in_groups
from glm_multiuser.checkpoint import read_model_config, stored_as
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.mindspore_internals import memory_of
from glm_multiuser.progress import Progress
from glm_multiuser.weights import Weight, load_weights
from tests.checkpoint.gguf_content import gguf_model
from tests.golden_data import golden_folder
from tests.kernels.group_weights import TYPES
from tests.kernels.weights import unpacked
from tests.models.native_driver import (
    NativeDriver,
    assert_logits_of_float32,
    has_bits_of_float32,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(library.unavailable_reason("CPU")), reason="no native kernels"),
]

KEPT = {
    "llama_bpe.Q4_K_M": {"q4_k", "q6_k", "float32"},
    "llama_spm.Q4_0": {"q4_0", "q6_k"},
    "qwen2.Q4_0": {"q4_0", "q6_k"},
    "qwen3.Q5_K_M": {"q5_k", "q6_k", "float32"},
    "glm4.Q4_K_S": {"q4_k", "q6_k", "float32"},
    "chatglm.Q3_K_M": {"q4_k", "q5_k", "q6_k", "float32"},
    "qwen2.Q8_0": {"q8_0"},
}
"""What the matrices of a file are kept in: types that kernels do not know become float32, and so
does a matrix whose queries, keys and values have several types."""


def logits_of(name: str, **settings: Any) -> tuple[np.ndarray, NativeDriver]:
    """Of a prompt in chunks, beside another user who decodes, and of the tokens that follow it."""
    driver = NativeDriver.of_folder(gguf_model(name), 2, 64, **settings)
    token_ids = np.random.default_rng(0).integers(3, driver.config.vocab_size, 41).tolist()
    return driver.answer(0, driver.request(token_ids), 4, driver.neighbours([1])), driver


@pytest.mark.parametrize("inputs", ["float32", pytest.param("bfloat16", marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_float32_weights(name: str, inputs: str) -> None:
    config = read_model_config(gguf_model(name))
    types = types_in_groups(load_weights(gguf_model(name), config).types)
    assert set(types.values()) == KEPT[name]
    found, driver = logits_of(name, inputs=inputs, types=types)
    expected, full = logits_of(name, inputs=inputs)
    assert_logits_of_float32(found, expected, "groups", inputs)

    def held(one: NativeDriver) -> int:
        caches = ("key_past", "value_past")
        parameters = one.runner.model.get_parameters()
        return sum(weight.nbytes for weight in parameters if not weight.name.endswith(caches))

    stored, engine = stored_as(gguf_model(name), config)[1], EngineConfig(2, 64, kernels="native")
    engine = backend_choice.with_weight_dtype(engine, config, "float32", stored)
    planned = memory.weight_bytes(config, engine)
    assert DEVICE_THREAD.call(lambda: held(driver)) == planned
    assert planned < DEVICE_THREAD.call(lambda: held(full))


def test_nobody_has_to_ask_for_it(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    caplog.set_level("INFO", "glm_multiuser.build")

    def answer(**settings: Any) -> tuple[str, Any]:
        settings |= {"users": 2, "seq_length": 64}
        with MultiUserLLM.from_pretrained(gguf_model("llama_bpe.Q4_K_M"), **settings) as llm:
            result = llm.submit([5, 6, 7, 8], params=params).result()
            return llm.stats().weight_dtype, (result.token_ids, result.logprobs)

    as_stored = answer()
    assert as_stored[0] == "float32, q4_k, q6_k"
    in_float32 = answer(weight_dtype="float32")
    assert in_float32[0] == "float32"
    assert in_float32[1][0] == as_stored[1][0]
    if has_bits_of_float32("q4_k"):
        assert in_float32[1] == as_stored[1]
    assert "rounded" not in caplog.text
    int4 = answer(weight_dtype="int4")
    assert int4[0] == "q4_1, q4_k, q6_k"
    assert int4[1] != as_stored[1]
    assert "matrices are rounded from float32, q4_k, q6_k to q4_1, q4_k, q6_k" in caplog.text


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("qwen2_tied", {"q4_1", "q8_0"}),
        ("chatglm_6b_3layers", {"q4_1", "q4_k", "q8_0"}),
    ],
)
def test_int4_answers_as_its_numbers_do(name: str, kept: set[str]) -> None:
    """Of a checkpoint that is not quantised: every matrix, and tables of more bits."""
    folder = golden_folder(name, "model.safetensors")
    config = read_model_config(folder)
    engine = backend_choice.with_weight_dtype(EngineConfig(weight_dtype="int4"), config, "float32")
    types = backend_choice.weight_types_of(engine)
    assert set(types.values()) == kept
    source = load_weights(folder, config)

    def fill_rounded(weights: Mapping[str, Weight], progress: Progress) -> None:
        source(weights, progress)
        for name, shape in parameter_shapes(config).items():
            if len(shape) > 1 and name in weights:
                values = unpacked_float32(weights[name])
                blocks, _ = quantise(types[name], values)
                block_type = TYPES[types[name]]
                rounded = block_type.dequantise(blocks.reshape(-1, block_type.bytes))
                weights[name].assign(rounded.reshape(shape))

    token_ids = np.random.default_rng(0).integers(3, config.vocab_size, 41).tolist()

    def answered(driver: NativeDriver) -> np.ndarray:
        return driver.answer(0, driver.request(token_ids), 4)

    found = NativeDriver(config, source, 1, 64, weight="int4", types=types)
    expected = NativeDriver(config, fill_rounded, 1, 64)
    assert_logits_of_float32(answered(found), answered(expected), "int4")


def test_int4_needs_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"weight_dtype is 'int4'; a matrix .* multiple of 32"):
        MultiUserLLM.from_pretrained(golden_folder("glm4"), users=1, weight_dtype="int4")


def unpacked_float32(weight: Weight) -> np.ndarray:
    """[outputs, inputs]"""
    assert isinstance(weight.packing, Packing)
    packed = memory_of(weight.parameter)
    return np.ascontiguousarray(unpacked(weight.packing, packed).astype(np.float32))
