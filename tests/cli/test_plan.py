"""How many users fit: arithmetic on shapes, checked by hand."""

from __future__ import annotations

from typing import Any, Callable

import pytest

from glm_multiuser import memory
from glm_multiuser.cli import plan
from glm_multiuser.published import PUBLISHED


@pytest.mark.parametrize(
    ("name", "kib_per_token", "billions"),
    [
        ("chatglm-6b", 448, 6.71),
        ("chatglm2-6b", 28, 6.24),
        ("chatglm3-6b", 28, 6.24),
        ("glm-4-9b-chat", 40, 9.40),
        ("qwen2-0.5b", 12, 0.494),
        ("qwen2-7b", 56, 7.62),
    ],
)
def test_published_models(name: str, kib_per_token: float, billions: float) -> None:
    config = PUBLISHED[name]
    assert memory.cache_bytes_per_user(config, 1, "float16") == kib_per_token * 1024
    assert memory.weight_count(config) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_what_it_prints(run: Callable[..., Any]) -> None:
    result = run("plan", "--model", "chatglm3-6b", "--device-memory", "32GiB")
    assert result.exit_code == 0, result.output
    assert "28 KiB" in result.stdout
    assert "56 MiB" in result.stdout  # 2048 tokens
    assert "11.63 GiB" in result.stdout


def test_one_more_user_would_not_fit() -> None:
    config, seq_length = PUBLISHED["chatglm3-6b"], 1024
    available = 14 * 2**30
    users = plan.users_that_fit(config, seq_length, "float16", available)
    per_user = memory.cache_bytes_per_user(config, seq_length, "float16")
    zeros = memory.cache_bytes_per_user(config, 512, "float16")
    fixed = 2 * memory.weight_count(config) + zeros
    assert fixed + users * per_user <= available < fixed + (users + 1) * per_user
    assert plan.users_that_fit(config, seq_length, "float16", 2**30) == 0


def test_a_checkpoint_folder(run: Callable[..., Any], glm_tiny: Any) -> None:
    result = run("plan", "--model", glm_tiny, "--seq-length", "512", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "8 KiB" in result.stdout  # 2 * 4 layers * 256 * 4 bytes


@pytest.mark.parametrize("text", ["", "many", "3 apples", "-1GiB", "1e999GiB"])
def test_sizes_that_are_none(run: Callable[..., Any], text: str) -> None:
    result = run("plan", "--device-memory", text)
    assert result.exit_code == 2
    assert "device-memory is" in result.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("1024", 1024), ("1.5 GiB", 3 * 2**29), ("2MB", 2_000_000)]
)
def test_sizes(text: str, count: int) -> None:
    assert plan.bytes_of(text) == count
