"""The models of GGUF files: logits and greedy tokens of every architecture and type, against the
original code on the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.checkpoint.gguf import config as gguf_config
from tests.checkpoint.gguf_content import Content, gguf_model
from tests.golden_data import golden_folder
from tests.models.golden_cases import Case, worst
from tests.models.native_driver import NativeDriver

pytestmark = pytest.mark.slow

TOLERANCE = 2e-4
SEQ_LENGTH = 256
NAMES = [
    *("llama_bpe.F32", "llama_bpe.Q4_K_M", "llama_spm.F16", "llama_spm.Q4_0", "qwen2.Q4_0"),
    *("qwen3.Q5_K_M", "glm4.Q4_K_S", "chatglm.Q3_K_M"),
]
RARE = [
    *("llama_bpe.Q8_0", "qwen2.F32", "qwen2.Q8_0", "qwen3.F32", "qwen3.Q8_0", "glm4.F32"),
    *("glm4.Q8_0", "chatglm.F32", "chatglm.Q8_0"),
]
"""Which have no type, and nothing else, that the others do not have."""


def read_cases(name: str) -> list[Case]:
    folder, key = golden_folder("gguf_models"), f"{name}.gguf"
    cases = json.loads((folder / "expected.json").read_text("utf-8"))["files"][key]["cases"]
    with np.load(folder / "expected.npz") as file:
        return [
            Case(
                one["name"],
                one["input_ids"],
                {"fp32": one["greedy"]},
                {"last_logits": file[f"{key}/{one['index']}/last_logits"]},
                TOLERANCE,
            )
            for one in cases
        ]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(one, marks=pytest.mark.rare) for one in RARE)]
)
def test_logits_and_greedy_tokens(name: str) -> None:
    cases = read_cases(name)
    driver = NativeDriver.of_folder(gguf_model(name), len(cases), SEQ_LENGTH)
    for case, (token_ids, logits) in zip(cases, driver.answer_together(cases)):
        assert token_ids == case.greedy["fp32"], case.name
        assert worst(logits, case.last_logits("fp32")) <= case.tolerance, case.name
    assert len(cases) == 8


def test_every_file_is_read_above() -> None:
    files = {path.stem for path in golden_folder("gguf_models").glob("*.gguf")}
    assert files == {*NAMES, *RARE}


@pytest.mark.parametrize("what", ["rows", "factors"])
def test_every_answer_depends_on_what_is_special(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows of queries and keys as they are in the file, or no factors of the frequencies."""
    content = Content.of(gguf_model("llama_bpe.F32"))
    if what == "rows":
        llama = gguf_config.ARCHITECTURES["llama"]._replace(permuted=False)
        monkeypatch.setitem(gguf_config.ARCHITECTURES, "llama", llama)
    else:
        content.tensors.remove(content.tensor("rope_freqs.weight"))
    path = content.write(tmp_path / "a.gguf")
    cases = read_cases("llama_bpe.F32")
    driver = NativeDriver.of_folder(path, len(cases), SEQ_LENGTH)
    for case, (token_ids, _) in zip(cases, driver.answer_together(cases)):
        assert token_ids != case.greedy["fp32"], case.name


def test_rows_in_halves_as_glm_4_1v_has_them(tmp_path: Path) -> None:
    """Rows of queries and keys as `Glm4Model.normal_to_neox` of llama.cpp's converter orders them
    where positions have several dimensions: the model is the same."""
    content = Content.of(gguf_model("glm4.F32"))
    head_dim, rotary_dim = 16, 8
    assert content.metadata["glm4.attention.key_length"] == head_dim
    assert content.metadata["glm4.rope.dimension_count"] == rotary_dim
    for tensor in content.tensors:
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            stored = np.frombuffer(tensor.content, "<f4")
            rows = stored.reshape(-1, head_dim, tensor.shape[1])
            turned, kept = rows[:, :rotary_dim], rows[:, rotary_dim:]
            ordered = np.concatenate((turned[:, ::2], turned[:, 1::2], kept), axis=1)
            tensor.content = ordered.tobytes()
    content.metadata["glm4.rope.dimension_sections"] = np.array([2, 1, 1, 0], "<i4")
    cases = read_cases("glm4.F32")[:2]
    driver = NativeDriver.of_folder(content.write(tmp_path / "a.gguf"), len(cases), SEQ_LENGTH)
    for case, (token_ids, logits) in zip(cases, driver.answer_together(cases)):
        assert token_ids == case.greedy["fp32"], case.name
        assert worst(logits, case.last_logits("fp32")) <= case.tolerance, case.name
