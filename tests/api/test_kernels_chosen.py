"""Which kernels an engine gets: native ones where they can be used, or an error that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import ConfigError, EngineConfig, memory
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.cells import NativeBackend
from glm_multiuser.build import choose_backend


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
@pytest.mark.parametrize("weight", [None, "float32", "float16", "bfloat16", "int8"])
def test_native_where_they_can_be_used(kernels: str, weight: Any) -> None:
    expected = (True, "float32", weight or "float32")
    assert chosen(kernels=kernels, weight_dtype=weight) == expected
    assert chosen(kernels=kernels, weight_dtype=weight, users_per_cell=3) == expected


@pytest.mark.parametrize("weight", [None, "float16", "bfloat16"])
def test_inputs_are_rounded_where_compute_dtype_says_so(weight: Any) -> None:
    for wanted in ("float32", "bfloat16"):
        backend = choose_backend(EngineConfig(weight_dtype=weight, compute_dtype=wanted))
        assert isinstance(backend, NativeBackend)
        assert backend.input_dtype == wanted


def test_matrices_stay_as_they_are_stored() -> None:
    """Where nobody says otherwise; MindSpore's operators have them in `dtype`."""
    native, portable = EngineConfig(), EngineConfig(kernels="portable")
    for stored in ("float32", "float16", "bfloat16"):
        assert memory.with_weight_dtype(native, stored) == EngineConfig(weight_dtype=stored)
        assert memory.with_weight_dtype(portable, stored).weight_dtype == "float32"
        chosen = EngineConfig(weight_dtype="int8")
        assert memory.with_weight_dtype(chosen, stored) is chosen


CANNOT = [
    ({"dtype": "float16"}, "they compute in float32, not in float16"),
    ({"device_target": "Ascend", "dtype": "float32"}, "they are for the CPU, not for Ascend"),
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
