"""Parameters together: what transformers' logits processors leave of the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_multiuser.sampling import choose
from glm_multiuser.sampling_params import SamplingParams, biases_by_id
from tests.sampling.test_choose import FixedSampler, token_of

CASES = json.loads(Path(__file__).with_name("processors.json").read_text("utf-8"))["cases"]
STEPS = 1000


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["params"]))
def test_probabilities_are_those_of_transformers(case: dict[str, Any]) -> None:
    biases = biases_by_id(case["params"].get("logit_bias", {}))
    params = SamplingParams(**{**case["params"], "logit_bias": biases})
    logits = np.array(case["logits"], np.float32)
    samplers = []
    for step in range(STEPS):
        sampler = FixedSampler(params, case["prompt"], case["stops"], len(logits))
        for token_id in case["answer"]:
            sampler.accept(token_id)
        sampler.number = (step + 0.5) / STEPS
        samplers.append(sampler)
    drawn = list(map(token_of, choose(np.tile(logits, (STEPS, 1)), samplers)))
    shares = np.bincount(drawn, minlength=len(logits)) / STEPS
    np.testing.assert_allclose(shares, case["probabilities"], atol=1.5 / STEPS)
