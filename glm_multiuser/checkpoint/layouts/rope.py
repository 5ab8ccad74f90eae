"""Reads the rotary settings of a `config.json`, as written by transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

from glm_multiuser.checkpoint.layouts.fields import positive, whole
from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import RopeScaling

KINDS = ("default", "linear", "llama3", "yarn")


def rope_fields(values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns the fields of `CausalConfig` for rotary embeddings.

    `rope_theta` and `partial_rotary_factor` are top-level fields in transformers 4; transformers 5
    moved them to `rope_parameters`, together with the former `rope_scaling`.

    Raises:
        ConfigError: a missing or invalid size, or an unsupported scaling.
    """
    merged = dict(values)
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
        if kind not in KINDS:
            raise ConfigError(
                f"{name} is {rope!r}; only rope_type {', '.join(map(repr, KINDS))} are computed "
                "here"
            )
        if kind != "default" and "factor" not in rope:
            raise ConfigError(f"{name} is {rope!r}; rope_type {kind!r} needs a factor")
        merged.update({**rope, "rope_type": kind})
    theta = positive(merged, "rope_theta", 10000.0)
    if theta <= 1:
        raise ConfigError(f"rope_theta is {theta:g}; it must exceed 1")
    positions = whole(values, "max_position_embeddings")
    scaling = _scaling(merged, positions)
    reach = positions
    if scaling is not None and scaling.kind != "llama3":
        reach = max(positions, int((scaling.original_positions or positions) * scaling.factor))
    return {
        "rotary_dim": int(head_dim * positive(merged, "partial_rotary_factor", 1.0)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_sequence_length": reach,
    }


def _scaling(values: Mapping[str, Any], positions: int) -> Optional[RopeScaling]:
    kind = values.get("rope_type", "default")
    if kind == "default":
        return None
    factor = positive(values, "factor", 1.0)
    original = whole(values, "original_max_position_embeddings", positions)
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "llama3":
        low = positive(values, "low_freq_factor", 1.0)
        high = positive(values, "high_freq_factor", 4.0)
        if high <= low:
            raise ConfigError(f"high_freq_factor is {high}; it must exceed low_freq_factor {low}")
        return RopeScaling(kind, factor, original, low, high)
    for name in ("mscale", "mscale_all_dim"):  # of YaRN in models of other families
        if values.get(name) is not None:
            raise ConfigError(f"{name} is {values[name]!r}; it is not computed here")
    if values.get("truncate") is False:
        raise ConfigError("truncate is false; only true is computed here")
    attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if values.get("attention_factor") is not None:
        attention_factor = positive(values, "attention_factor", attention_factor)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=positive(values, "beta_fast", 32.0),
        beta_slow=positive(values, "beta_slow", 1.0),
        attention_factor=attention_factor,
    )
