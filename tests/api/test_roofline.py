"""The roofline of a decode step, against numbers computed by hand."""

from __future__ import annotations

import pytest

from glm_multiuser import EngineConfig
from glm_multiuser.cli.published import PUBLISHED
from glm_multiuser.cli.roofline import DEVICES, decode_step, operations_per_token, user_counts

CONFIG = PUBLISHED["chatglm-6b"]
ENGINE = EngineConfig(dtype="float16", device_target="Ascend")
EMBEDDING = 130528 * 4096


def test_a_step_reads_the_weights_once_and_everybodys_caches() -> None:
    # Of 28 layers: products of 3, 1, 4 and 4 times hidden squared, their biases, and two norms.
    layer = 12 * 4096**2 + (3 + 1 + 4 + 1) * 4096 + 4 * 4096
    weights = 28 * layer + EMBEDDING + 2 * 4096
    for users in (1, 16):
        step = decode_step(CONFIG, ENGINE, users, 1024, 1.2e12, 256e12)
        assert step.bytes_read == 2 * weights + users * 448 * 2**20
        assert step.bound == "memory"
        assert step.seconds == pytest.approx(step.bytes_read / 1.2e12)
        assert step.tokens_per_second == pytest.approx(users / step.seconds)


def test_operations_are_those_of_the_matrices_and_of_attention() -> None:
    matrices = 28 * 12 * 4096**2 + EMBEDDING
    assert operations_per_token(CONFIG, 1) - 2 * matrices == 4 * 28 * 4096
    assert operations_per_token(CONFIG, 100) - 2 * matrices == 100 * 4 * 28 * 4096


def test_a_tied_output_layer_is_computed_though_it_has_no_weights_of_its_own() -> None:
    tied = PUBLISHED["qwen2-0.5b"]
    assert operations_per_token(tied, 1) > 2 * 151936 * 896


def test_little_compute_is_the_bound_when_many_share_the_weights() -> None:
    alone = decode_step(CONFIG, ENGINE, 1, 1, 1e12, 20e12)
    many = decode_step(CONFIG, ENGINE, 64, 1, 1e12, 20e12)
    assert (alone.bound, many.bound) == ("memory", "compute")
    assert many.seconds == pytest.approx(many.operations / 20e12)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (43, [1, 2, 4, 8, 16, 32, 43])],
)
def test_user_counts_end_with_the_most(most: int, counts: list[int]) -> None:
    assert user_counts(most) == counts


def test_cards_compute_on_ascend() -> None:
    for name in ("910A", "910B"):
        known = DEVICES[name]
        assert known.target == "Ascend"
        assert None not in (known.memory, known.bandwidth, known.compute)
