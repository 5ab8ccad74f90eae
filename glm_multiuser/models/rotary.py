"""Rotary position embeddings (Su et al. 2021, RoFormer), as tables and index arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.model_config import AnyModelConfig, CausalConfig, RopeScaling

Array = NDArray[Any]


@dataclass(frozen=True)
class RotaryEmbedding:
    """`x[i]` becomes `x[i] * cosine[i] + x[partner[i]] * sine[i]` in every head.

    Attributes:
        parts: of a head, each rotated by its own position.
        partner: int32 [head_dim].
        tables: number of positions -> cosines and signed sines, each float32 [positions, head_dim /
            parts].
    """

    parts: int
    partner: Array
    tables: Callable[[int], tuple[Array, Array]]

    @property
    def partners(self) -> Array:
        """float32 [head_dim, head_dim], a permutation matrix: `x @ partners` is `x[partner]`."""
        matrix: Array = np.zeros((len(self.partner), len(self.partner)), np.float32)
        matrix[self.partner, np.arange(len(self.partner))] = 1.0
        return matrix


def rotary_of(config: AnyModelConfig, dtype: str) -> RotaryEmbedding:
    """The rotary embedding of a model.

    The tables of ChatGLM-6B are computed in `dtype`, "float32" or "float16"; those of the causal
    families always in float32.
    """
    if isinstance(config, CausalConfig):
        return causal_rotary(config)
    # The first half of each head is rotated by the position in the context, the second half by the
    # position in the answer (Du et al. 2022, GLM; `RotaryEmbedding` of the published model).
    quarters = np.arange(config.head_dim, dtype=np.int32).reshape(4, -1)
    partner = quarters[[1, 0, 3, 2]].reshape(-1)
    return RotaryEmbedding(
        2, partner, lambda positions: rotary_tables(positions, config.head_dim // 2, dtype)
    )


def rotary_tables(positions: int, dimensions: int, dtype: str) -> tuple[Array, Array]:
    """Cosines and signed sines of ChatGLM-6B, float32 `[positions, dimensions]` each.

    As in the published model, inverse frequencies are rounded to float16 once, and everything else
    is computed in `dtype`, "float32" or "float16". The first half of each row of sines is negated.
    `dimensions`, the size of the rotated vector, must be even.
    """
    frequencies = inverse_frequencies(dimensions, 10000.0).astype(np.float16)
    angles = np.outer(np.arange(positions).astype(dtype), frequencies.astype(dtype)).astype(dtype)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return np.concatenate((cosine, cosine), 1), np.concatenate((-sine, sine), 1)


def causal_rotary(config: CausalConfig) -> RotaryEmbedding:
    """The rotary embedding of a causal model, computed in float32.

    The first `rotary_dim` elements of a head are rotated in pairs; for the others the cosine is 1
    and the sine 0. ChatGLM pairs neighbours, 0 with 1 and so on (`apply_rotary_pos_emb` of
    THUDM/chatglm3-6b); Llama pairs element i of the first half with element i of the second
    (`rotate_half` of transformers).
    """
    dimensions, rest = config.rotary_dim, config.head_dim - config.rotary_dim
    indices = np.arange(dimensions)
    if config.rotary_interleaved:
        pair, is_first, partner = indices // 2, indices % 2 == 0, indices ^ 1
    else:
        half = dimensions // 2
        pair, is_first, partner = indices % half, indices < half, (indices + half) % dimensions
    frequencies, factor = scaled_frequencies(config)
    signs = np.where(is_first, np.float32(-factor), np.float32(factor))

    def tables(positions: int) -> tuple[Array, Array]:
        angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)[:, pair]
        cosine = np.pad(np.cos(angles) * np.float32(factor), ((0, 0), (0, rest)), constant_values=1)
        return cosine, np.pad(np.sin(angles) * signs, ((0, 0), (0, rest)))

    whole = np.concatenate((partner, np.arange(dimensions, config.head_dim)))
    return RotaryEmbedding(1, whole.astype(np.int32), tables)


def inverse_frequencies(dimensions: int, theta: float) -> Array:
    """float32 [dimensions / 2]: `theta ** (-2 i / dimensions)`."""
    exponents = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(dimensions)
    frequencies: Array = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    return frequencies


def scaled_frequencies(config: CausalConfig) -> tuple[Array, float]:
    """The inverse frequencies of a model, and the factor of its cosines and sines.

    The formulas are those of modeling_rope_utils.py in transformers.
    """
    frequencies = inverse_frequencies(config.rotary_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "factors":
        return frequencies / np.asarray(scaling.factors, np.float32), 1.0
    stretched = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, stretched, scaling), 1.0
    return _yarn(config, frequencies, stretched, scaling), scaling.attention_factor


def _llama3(frequencies: Array, stretched: Array, scaling: RopeScaling) -> Array:
    """Scales low frequencies, keeps high ones, and interpolates in between."""
    waves = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_positions / waves - low) / (high - low)
    band = (1 - smooth) * stretched + smooth * frequencies
    found: Array = np.where(waves > scaling.original_positions / low, stretched, band)
    found = np.where(waves < scaling.original_positions / high, frequencies, found)
    return found.astype(np.float32)


def _yarn(
    config: CausalConfig, frequencies: Array, stretched: Array, scaling: RopeScaling
) -> Array:
    """YaRN (Peng et al. 2023): keeps high frequencies, scales low ones, interpolates in between."""

    def dimension(turns: float) -> float:
        """Index of the pair that makes this many turns within the original positions."""
        waves = scaling.original_positions / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(waves) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.rotary_dim - 1)
    width = high - low or 0.001
    ramp = (np.arange(len(frequencies), dtype=np.float32) - low) / width
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    found: Array = stretched * (1 - kept) + frequencies * kept
    return found
