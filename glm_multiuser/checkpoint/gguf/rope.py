"""Reads the scaling of rotary frequencies from a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

import numpy as np

from glm_multiuser.checkpoint.gguf.file import GGUFFile
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import CausalConfig, RopeScaling

FACTORS = "rope_freqs.weight"
"""The tensor of each frequency's divisor."""

LOW, HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama."""


def rope_scaling_values(own: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """Returns `rope_scaling` of a `config.json`; `own` is the metadata of the architecture.

    Follows `llama_model::load_hparams` of llama.cpp: without a type, scaling is linear, and a
    factor of 0 means 1.
    """
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear")) or 1.0
    kind = own.get("rope.scaling.type", "none" if factor == 1 else "linear")
    if kind == "none":
        return None
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {name: own.get(f"rope.scaling.{key}") for name, key in keys.items()}
    given = {name: value for name, value in found.items() if value is not None}
    return {"rope_type": kind, "factor": factor, **given}


def scaling_by_factors(
    file: GGUFFile, rotary_dim: int, described: Optional[RopeScaling]
) -> Optional[RopeScaling]:
    """Returns the scaling of the metadata, or a divisor of every frequency, as in Llama 3.1.

    Raises:
        ConfigError: both, or invalid divisors.
    """
    tensor = file.tensors.get(FACTORS)
    if tensor is None:
        return described
    if described is not None:
        raise ConfigError(f"{FACTORS} and another scaling are both there")
    if tensor.shape != (rotary_dim // 2,):
        raise ConfigError(
            f"{FACTORS} has shape {list(tensor.shape)}; this model needs [{rotary_dim // 2}]"
        )
    factors = tensor.read().astype(np.float32)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{FACTORS} has values that are not finite and positive")
    return RopeScaling("factors", 1.0, factors=tuple(factors.tolist()))


def as_llama3(config: CausalConfig) -> Optional[RopeScaling]:
    """Returns the "llama3" scaling with the divisors of a model, or None if there is none.

    The formula is `generate_extra_tensors` of `LlamaModel` in llama.cpp's convert_hf_to_gguf.py,
    solved for the original positions at the frequencies that are neither kept nor divided by the
    whole factor; then every divisor is compared.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "factors":
        return None
    divisors = np.asarray(scaling.factors, np.float64)
    waves = 2 * math.pi * config.rope_theta ** np.linspace(0, 1, len(divisors), endpoint=False)
    factor = divisors.max()
    (between,) = np.nonzero((divisors > 1) & (divisors < factor))
    if not len(between):
        return None
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    original = round(float((waves * (smooth * (HIGH - LOW) + LOW))[between].mean()))
    smooth = np.clip((original / waves - LOW) / (HIGH - LOW), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        return None
    return RopeScaling("llama3", float(factor), original, LOW, HIGH)
