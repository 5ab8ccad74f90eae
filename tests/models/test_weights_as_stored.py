"""A checkpoint of 16 bits stays one, and answers with the bits of the same numbers in float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from glm_multiuser import EngineConfig, MultiUserLLM, SamplingParams, memory
from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.weights import load_weights
from tests.golden_data import golden_folder
from tests.models.golden_cases import CAUSAL
from tests.models.native_driver import (
    NativeDriver,
    assert_logits_of_float32,
    has_bits_of_float32,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(library.unavailable_reason("CPU")), reason="no native kernels"),
]

OFTEN = {
    *(("chatglm_6b_3layers", "float16"), ("chatglm3_6b", "float16"), ("glm4", "bfloat16")),
    *(("glm4_0414", "bfloat16"), ("llama", "float16"), ("qwen2_tied", "bfloat16")),
    ("qwen3", "bfloat16"),
}
"""Every family once; the other combinations are rare."""

CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in OFTEN else pytest.mark.rare)
    for name in ("chatglm_6b_3layers", *CAUSAL)
    for dtype in ("float16", "bfloat16")
]


def rounded_copy(name: str, dtype: str, folder: Path) -> Path:
    """A golden folder whose weights are the nearest ones of 16 bits, and stored as such."""
    golden = golden_folder(name, "model.safetensors")
    shutil.copyfile(golden / "config.json", folder / "config.json")
    tensors = load_file(golden / "model.safetensors")
    if dtype == "float16":
        arrays = {one: values.astype(np.float16) for one, values in tensors.items()}
    else:
        # To nearest: half a unit, and where that is a tie the last bit decides.
        bits = {one: values.view(np.uint32) for one, values in tensors.items()}
        arrays = {
            one: ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype("<u2") for one, b in bits.items()
        }
    sizes = {one: (values.shape, values.dtype) for one, values in arrays.items()}
    save_safetensors(folder / "model.safetensors", sizes, arrays.items())
    return folder


def logits_of(folder: Path, weight: str) -> tuple[np.ndarray, NativeDriver]:
    """Of a prompt in chunks, beside another user who decodes, and of the tokens that follow it."""
    driver = NativeDriver.of_folder(folder, 2, 64, weight=weight)
    token_ids = np.random.default_rng(0).integers(3, driver.config.vocab_size, 41).tolist()
    return driver.answer(0, driver.request(token_ids), 4, driver.neighbours([1])), driver


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits_have_the_bits_of_float32_weights(tmp_path: Path, name: str, dtype: str) -> None:
    folder = rounded_copy(name, dtype, tmp_path)
    config = read_model_config(folder)
    assert load_weights(folder, config).dtype == dtype
    found, driver = logits_of(folder, dtype)
    expected, full = logits_of(folder, "float32")
    assert_logits_of_float32(found, expected, dtype)

    def held(one: NativeDriver) -> int:
        caches = ("key_past", "value_past")
        parameters = one.runner.model.get_parameters()
        return sum(weight.nbytes for weight in parameters if not weight.name.endswith(caches))

    engine = EngineConfig(2, 64, kernels="native", weight_dtype=dtype)
    planned = memory.weight_bytes(config, engine)
    assert DEVICE_THREAD.call(lambda: held(driver)) == planned
    assert planned < 0.6 * DEVICE_THREAD.call(lambda: held(full))


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.rare)])
def test_nobody_has_to_ask_for_it(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = rounded_copy("qwen2_tied", dtype, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    caplog.set_level("INFO", "glm_multiuser.build")

    def answer(**settings: Any) -> tuple[str, Any]:
        with MultiUserLLM.from_pretrained(folder, users=2, seq_length=64, **settings) as llm:
            result = llm.submit([5, 6, 7, 8], params=params).result()
            return llm.stats().weight_dtype, (result.token_ids, result.logprobs)

    as_stored = answer()
    assert as_stored[0] == dtype
    if has_bits_of_float32(dtype):
        assert answer(weight_dtype="float32") == ("float32", as_stored[1])
    assert "rounded" not in caplog.text
    other = {"float16": "bfloat16", "bfloat16": "float16"}[dtype]
    assert answer(weight_dtype=other)[0] == other
    assert f"matrices are rounded from {dtype} to {other}" in caplog.text
    assert answer(compute_dtype="bfloat16")[1] != as_stored[1]
