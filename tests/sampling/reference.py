"""The usual definition of sampling, on one row, in float64 and with a full sort."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.sampling_params import SamplingParams


def distribution(
    logits: NDArray[Any],
    params: SamplingParams,
    seen: Iterable[int] = (),
    held_back: Iterable[int] = (),
) -> NDArray[np.float64]:
    """The probability of every token: logits [vocab] -> [vocab].

    seen: tokens under the repetition penalty. held_back: tokens that min_tokens masks.
    """
    scores = logits.astype(np.float64)
    for token in set(seen):
        penalty = params.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    scores[list(held_back)] = -np.inf
    if params.temperature == 0:
        return np.where(np.arange(len(scores)) == scores.argmax(), 1.0, 0.0)
    by_rank = np.argsort(-scores, kind="stable")
    probabilities = np.exp((scores - scores.max()) / params.temperature)
    if params.top_k:
        probabilities[by_rank[params.top_k :]] = 0.0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities[by_rank]) - probabilities[by_rank]
        probabilities[by_rank[before >= params.top_p]] = 0.0
        probabilities /= probabilities.sum()
    result: NDArray[np.float64] = probabilities
    return result


def assert_fits(drawn: NDArray[Any], probabilities: NDArray[np.float64]) -> None:
    """Pearson's chi-square: within five standard deviations of what honest draws give."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(drawn)
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(1, len(expected) - 1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)
