"""Resolves settings that are None or automatic: an engine's backend and types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Optional

from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.weight_types import (
    described,
    types_for_int4,
    types_in_groups,
)
from glm_multiuser.checkpoint.families import parameter_shapes
from glm_multiuser.config import EngineConfig, MixedEngineConfig
from glm_multiuser.device import DEFAULT_DTYPE
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import AnyModelConfig


def dtype_of(engine: EngineConfig) -> str:
    """Type of the arithmetic: the engine's setting, or the device's default."""
    return engine.dtype or DEFAULT_DTYPE[engine.device_target]


def is_native(engine: EngineConfig) -> bool:
    """Whether native kernels would be used; for CPUs, on this machine."""
    return not portable_reason(engine)


def portable_reason(engine: EngineConfig) -> str:
    """Why MindSpore's operators would be used; "" if native kernels would."""
    return portable_by_choice(engine) or library.unavailable_reason(engine.device_target)


def portable_by_choice(engine: EngineConfig) -> str:
    """The setting that rules out native kernels; "" if none does."""
    if engine.kernels == "portable":
        return "kernels is 'portable'"
    if engine.device_target != "CPU":
        return library.unavailable_reason(engine.device_target)
    if dtype_of(engine) != "float32":
        return f"they compute in float32, not in {dtype_of(engine)}"
    if engine.kernels == "auto" and os.environ.get(library.SWITCH) == "0":
        return f"{library.SWITCH} is 0"
    return ""


def check_kernels(engine: EngineConfig) -> None:
    """Raises ConfigError if a setting requires native kernels, and they are unavailable."""
    reason = portable_reason(engine)
    if reason and engine.kernels == "native":
        raise ConfigError(f"kernels is 'native', but {reason}")
    own = (None, dtype_of(engine))
    possible = {"weight_dtype": own, "compute_dtype": ("float32",), "cache_dtype": own}
    for name, values in possible.items():
        if reason and getattr(engine, name) not in values:
            wanted = f"{name} {getattr(engine, name)!r}"
            raise ConfigError(f"{wanted} needs native kernels, but {reason}")


def with_weight_dtype(
    engine: EngineConfig,
    config: AnyModelConfig,
    stored: str,
    types: Optional[Mapping[str, str]] = None,
) -> EngineConfig:
    """Resolves `weight_dtype`. If it is None, matrices keep the checkpoint's type: `stored` or, per
    matrix, `types`; with MindSpore's operators they get `dtype`. With int4, the type is chosen per
    matrix.

    Raises:
        ConfigError: `compute_dtype` is int8, and no matrix is in groups or int8.
    """
    if engine.weight_dtype == "int4":
        shapes, table = parameter_shapes(config), (config.vocab_size, config.hidden_size)
        inputs = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2}
        tables = [name for name in inputs if shapes[name] == table]
        return _mixed(engine, "int4", types_for_int4(types or {}, inputs, tables))
    if engine.weight_dtype is not None:
        return engine
    if not is_native(engine):
        return replace(engine, weight_dtype=dtype_of(engine))
    kept = types_in_groups(types or {})
    if kept:
        return _mixed(engine, stored, kept)
    if engine.compute_dtype == "int8":
        raise ConfigError(
            "compute_dtype is 'int8'; weight_dtype must be 'int8' or 'int4', because the matrices "
            f"of this model are {stored}"
        )
    return replace(engine, weight_dtype=stored)


def _mixed(engine: EngineConfig, dtype: str, types: Mapping[str, str]) -> EngineConfig:
    return MixedEngineConfig(**{**vars(engine), "weight_dtype": dtype, "weight_types": types})


def weight_types_of(engine: EngineConfig) -> Mapping[str, str]:
    """Name of a matrix -> its type, if that is not `weight_dtype`."""
    return engine.weight_types if isinstance(engine, MixedEngineConfig) else {}


def weight_dtype_of(engine: EngineConfig) -> str:
    """Types of the matrices, for people."""
    return described(engine.weight_dtype or dtype_of(engine), weight_types_of(engine))


def cache_dtype_of(engine: EngineConfig) -> str:
    """Type of the KV cache. If `cache_dtype` is None: bfloat16 if inputs of products are rounded,
    else float32; with MindSpore's operators `dtype`."""
    if engine.cache_dtype is not None:
        return engine.cache_dtype
    rounds = engine.compute_dtype != "float32" or engine.weight_dtype == "int8"
    return "bfloat16" if rounds and is_native(engine) else dtype_of(engine)
