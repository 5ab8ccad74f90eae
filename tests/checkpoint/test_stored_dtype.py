"""What the matrices of a checkpoint are stored as, and reading them as that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.bfloat16 import BITS, to_bfloat16
from glm_multiuser.checkpoint import check_tensors, load_checkpoint, stored_as
from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import CONFIG, MODEL, Array, our_shapes, their_arrays, write_json

TYPES = {"float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "<u2"}


def stored(values: Array, dtype: str) -> Array:
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(TYPES[dtype])


def write(folder: Path, arrays: dict[str, Array]) -> Path:
    sizes = {name: (one.shape, one.dtype) for name, one in arrays.items()}
    save_safetensors(folder / "model.safetensors", sizes, arrays.items())
    return folder


@pytest.mark.parametrize("dtype", TYPES)
def test_all_matrices_alike(tmp_path: Path, dtype: str) -> None:
    """Vectors may be anything: they become float32."""
    arrays = {
        name: stored(one, dtype) if one.ndim > 1 else one for name, one in their_arrays().items()
    }
    expected = dtype if dtype in ("float16", "bfloat16") else "float32"
    folder = write(tmp_path, arrays)
    assert check_tensors(folder, MODEL) == stored_as(folder, MODEL)[0] == expected


@pytest.mark.parametrize(
    "kinds", [("float16", "float32"), ("float16", "bfloat16"), ("bfloat16", "float64")]
)
def test_of_several_types_only_float32_holds_all(tmp_path: Path, kinds: tuple[str, str]) -> None:
    arrays = {
        name: stored(one, kinds[number % 2])
        for number, (name, one) in enumerate(their_arrays().items())
    }
    assert stored_as(write(tmp_path, arrays), MODEL)[0] == "float32"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": ["?"]}, "float32"),
        ({}, "float32"),
    ],
)
def test_without_weights_config_json_has_to_say_it(
    tmp_path: Path, told: dict[str, object], expected: str
) -> None:
    write_json(tmp_path / "config.json", {**CONFIG, **told})
    assert stored_as(tmp_path, MODEL)[0] == expected
    with pytest.raises(CheckpointError, match="no weights in"):
        check_tensors(tmp_path, MODEL)


@pytest.mark.parametrize("dtype", TYPES)
def test_matrices_are_read_as_bfloat16(tmp_path: Path, dtype: str) -> None:
    """Each number is rounded once; those that are bfloat16 already keep their bits."""
    arrays = their_arrays()
    folder = write(tmp_path, {name: stored(one, dtype) for name, one in arrays.items()})
    read: dict[str, Array] = {}
    parameters = {name: (shape, BITS) for name, shape in our_shapes().items()}
    load_checkpoint(folder, MODEL, parameters, read.__setitem__)
    table = arrays["transformer.word_embeddings.weight"]
    values = table if dtype == "bfloat16" else stored(table, dtype).astype(np.float32)
    found = read["transformer.word_embeddings.embedding_table"]
    assert found.dtype == BITS
    assert np.array_equal(found, to_bfloat16(values))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (3.4e38, BITS, "has values beyond the range of bfloat16"),
        (70000.0, np.dtype("f2"), "has values beyond the range of float16"),
        (np.inf, BITS, "has values that are not finite"),
        (np.nan, BITS, "has values that are not finite"),
    ],
)
def test_numbers_that_16_bits_cannot_hold(
    tmp_path: Path, value: float, dtype: np.dtype[np.generic], message: str
) -> None:
    arrays = their_arrays()
    arrays["lm_head.weight"][3, 2] = value
    folder = write(tmp_path, arrays)
    parameters = {name: (shape, dtype) for name, shape in our_shapes().items()}
    with pytest.raises(CheckpointError, match=f"lm_head.weight in .* {message}"):
        load_checkpoint(folder, MODEL, parameters, lambda name, values: None)


def test_bfloat16_that_is_not_finite(tmp_path: Path) -> None:
    arrays = {name: to_bfloat16(one) for name, one in their_arrays().items()}
    arrays["lm_head.weight"][3, 2] = 0xFF80
    parameters = {name: (shape, BITS) for name, shape in our_shapes().items()}
    with pytest.raises(CheckpointError, match="values that are not finite"):
        load_checkpoint(write(tmp_path, arrays), MODEL, parameters, lambda name, values: None)
