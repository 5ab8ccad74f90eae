"""Which kernels an engine gets: native ones where they can be used, or an error that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import ConfigError, EngineConfig, backend_choice
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.build import choose_backend
from glm_multiuser.checkpoint.families import parameter_shapes
from tests.engine.small_model import CAUSAL, MODEL


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library was there and not switched off."""
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(library, "PATH", Path(__file__))
    monkeypatch.setattr(library, "open_library", lambda: None)


def chosen(**settings: Any) -> tuple[bool, str, str]:
    backend = choose_backend(EngineConfig(**settings))
    return backend.name == "native", backend.dtype, backend.weight_dtype


@pytest.mark.parametrize("kernels", ["auto", "native"])
@pytest.mark.parametrize("weight", [None, "float32", "float16", "bfloat16", "int8", "int4"])
def test_native_where_they_can_be_used(kernels: str, weight: Any) -> None:
    expected = (True, "float32", weight or "float32")
    assert chosen(kernels=kernels, weight_dtype=weight) == expected
    assert chosen(kernels=kernels, weight_dtype=weight, users_per_cell=3) == expected


@pytest.mark.parametrize("weight", [None, "float16", "bfloat16", "int8", "int4"])
def test_inputs_are_rounded_where_compute_dtype_says_so(weight: Any) -> None:
    for wanted in ("float32", "bfloat16", *(["int8"] if weight in (None, "int8", "int4") else [])):
        backend = choose_backend(EngineConfig(weight_dtype=weight, compute_dtype=wanted))
        assert isinstance(backend, NativeBackend)
        assert backend.input_dtype == wanted


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "float32"),
        ({"weight_dtype": "bfloat16"}, "float32"),
        ({"compute_dtype": "bfloat16"}, "bfloat16"),
        ({"weight_dtype": "int8"}, "bfloat16"),
        ({"weight_dtype": "int4"}, "float32"),
        ({"weight_dtype": "int4", "compute_dtype": "int8"}, "bfloat16"),
        ({"cache_dtype": "int8"}, "int8"),
        ({"cache_dtype": "bfloat16"}, "bfloat16"),
        ({"cache_dtype": "float32", "compute_dtype": "bfloat16"}, "float32"),
        ({"kernels": "portable", "cache_dtype": "float32"}, "float32"),
        ({"kernels": "portable", "dtype": "float16"}, "float16"),
    ],
)
def test_caches_follow_the_inputs_of_products(settings: dict[str, Any], expected: str) -> None:
    engine = EngineConfig(**settings)
    assert choose_backend(engine).cache_dtype == backend_choice.cache_dtype_of(engine) == expected


def test_matrices_stay_as_they_are_stored() -> None:
    """By default; MindSpore's operators have them in `dtype`."""
    native, portable = EngineConfig(), EngineConfig(kernels="portable")
    for stored in ("float32", "float16", "bfloat16"):
        assert backend_choice.with_weight_dtype(native, MODEL, stored) == EngineConfig(
            weight_dtype=stored
        )
        assert backend_choice.with_weight_dtype(portable, MODEL, stored).weight_dtype == "float32"
        chosen = EngineConfig(weight_dtype="int8")
        assert backend_choice.with_weight_dtype(chosen, MODEL, stored) is chosen


def test_matrices_in_groups_stay_as_they_are_stored() -> None:
    """By the matrix; those of types that kernels do not know are widened."""
    stored = {"a": "q4_k", "b": "q5_0", "c": "float16"}
    engine = backend_choice.with_weight_dtype(EngineConfig(), MODEL, "float32", stored)
    assert backend_choice.weight_types_of(engine) == {"a": "q4_k", "b": "float32", "c": "float16"}
    assert backend_choice.weight_dtype_of(engine) == "float16, float32, q4_k"
    portable = EngineConfig(kernels="portable")
    assert backend_choice.with_weight_dtype(portable, MODEL, "float32", stored) == replace(
        portable, weight_dtype="float32"
    )
    halves = backend_choice.with_weight_dtype(EngineConfig(), MODEL, "float16", {"c": "float16"})
    assert halves == EngineConfig(weight_dtype="float16")


def test_int8_inputs_need_a_matrix_in_groups() -> None:
    engine = EngineConfig(compute_dtype="int8")
    made = backend_choice.with_weight_dtype(engine, MODEL, "float32", {"a": "q4_k", "b": "q5_0"})
    assert backend_choice.weight_types_of(made) == {"a": "q4_k", "b": "float32"}
    backend = choose_backend(made)
    assert isinstance(backend, NativeBackend)
    assert (backend.input_dtype, backend.cache_dtype) == ("int8", "bfloat16")
    with pytest.raises(ConfigError) as caught:
        backend_choice.with_weight_dtype(engine, MODEL, "float16", {"a": "float16"})
    assert str(caught.value) == (
        "compute_dtype is 'int8'; weight_dtype must be 'int8' or 'int4', because the matrices of "
        "this model are float16"
    )


def test_int4_leaves_tables_8_bits_and_4_bits_as_they_are() -> None:
    table = "transformer.embedding.word_embeddings.weight"
    output = "transformer.output_layer.weight"
    a, b, c = [name for name in parameter_shapes(CAUSAL) if ".mlp." in name][:3]
    engine = EngineConfig(weight_dtype="int4")
    made = backend_choice.with_weight_dtype(engine, CAUSAL, "float32")
    types = backend_choice.weight_types_of(made)
    assert (types[table], types[output], types[a]) == ("q8_0", "q8_0", "q4_1")
    assert backend_choice.weight_dtype_of(made) == "q4_1, q8_0"
    stored = {a: "q4_k", b: "q6_k", c: "float16", table: "q6_k", output: "float16"}
    types = backend_choice.weight_types_of(
        backend_choice.with_weight_dtype(engine, CAUSAL, "float32", stored)
    )
    assert {name: types[name] for name in stored} == {
        **{a: "q4_k", b: "q4_1", c: "q4_1"},
        **{table: "q6_k", output: "q8_0"},
    }


def test_int4_takes_the_smaller_types_where_inputs_are_whole_blocks() -> None:
    wide = replace(CAUSAL, hidden_size=256, inner_hidden_size=384)
    made = backend_choice.with_weight_dtype(EngineConfig(weight_dtype="int4"), wide, "float32")
    types = backend_choice.weight_types_of(made)
    table = (wide.vocab_size, wide.hidden_size)
    for name, shape in parameter_shapes(wide).items():
        if len(shape) == 2:
            in_blocks = "q6_k" if shape == table else "q4_k"
            assert types[name] == (in_blocks if shape[1] == 256 else "q4_1"), name
    assert backend_choice.weight_dtype_of(made) == "q4_1, q4_k, q6_k"


CANNOT = [
    ({"dtype": "float16"}, "they compute in float32, not in float16"),
    ({"device_target": "Ascend", "dtype": "float32"}, "they are for the CPU, not for Ascend"),
    ({"device_target": "Ascend", "dtype": "float16"}, "they are for the CPU, not for Ascend"),
]


@pytest.mark.parametrize(("settings", "reason"), CANNOT)
def test_native_where_they_cannot_be_used(settings: dict[str, Any], reason: str) -> None:
    assert not chosen(**settings)[0]
    with pytest.raises(ConfigError) as caught:
        chosen(kernels="native", **settings)
    assert str(caught.value) == f"kernels is 'native', but {reason}"
    with pytest.raises(ConfigError) as caught:
        chosen(weight_dtype="int8", **settings)
    assert str(caught.value) == f"weight_dtype 'int8' needs native kernels, but {reason}"
    with pytest.raises(ConfigError) as caught:
        chosen(compute_dtype="bfloat16", **settings)
    assert str(caught.value) == f"compute_dtype 'bfloat16' needs native kernels, but {reason}"
    for cache in ("bfloat16", "int8"):
        with pytest.raises(ConfigError) as caught:
            chosen(cache_dtype=cache, **settings)
        assert str(caught.value) == f"cache_dtype '{cache}' needs native kernels, but {reason}"


def test_what_was_not_built_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", Path("/nowhere/native.so"))
    assert not chosen()[0]
    with pytest.raises(ConfigError, match="they were not built"):
        chosen(kernels="native")


def test_what_does_not_load_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("wrong machine")

    monkeypatch.setattr(library, "open_library", fail)
    assert not chosen()[0]
    with pytest.raises(ConfigError, match="the library does not load: wrong machine"):
        chosen(kernels="native")


def test_native_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert not chosen()[0]
    assert chosen(kernels="native")[0], "an explicit choice counts"


def test_portable_is_never_native() -> None:
    assert chosen(kernels="portable") == (False, "float32", "float32")
    assert chosen(kernels="portable", weight_dtype="float32") == (False, "float32", "float32")
    with pytest.raises(ConfigError, match="weight_dtype 'bfloat16' needs native kernels"):
        chosen(kernels="portable", weight_dtype="bfloat16")
    with pytest.raises(ConfigError, match="cache_dtype 'int8' needs native kernels"):
        chosen(kernels="portable", cache_dtype="int8")
