"""`benchmarks/peers`: the arithmetic of its tables, without measuring anything."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.server.process import ROOT

SHAPE = {"hidden_size": 8, "inner_hidden_size": 16, "num_layers": 2, "vocab_size": 32}
WEIGHTS = 2 * (4 * 64 + 2 * 128) + 32 * 8
CACHED = 2 * 2 * 8
"""Numbers that one position of one user keeps."""


@pytest.fixture(autouse=True)
def find_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files find each other as when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")


def run(variant: str, *rounds: float, users: int = 1, **more: Any) -> dict[str, Any]:
    found = {"variant": variant, "context": 128, "users": users, "rounds": list(rounds)}
    return {**found, "reason": None, **more}


def peaks(gigabytes: float, **gflops: float) -> dict[str, Any]:
    return {"read_gb_s": gigabytes, "gflops": gflops}


def test_weights_read_by_a_step() -> None:
    assert import_module("roofline").weight_count(SHAPE) == WEIGHTS


def test_the_roofline_is_memory_where_reading_takes_longer() -> None:
    seconds = import_module("roofline").step_seconds(
        peaks(1.0, float32=1e9), SHAPE, users=3, positions=10, weights="bfloat16", cache_bytes=4
    )
    assert seconds == pytest.approx((2 * WEIGHTS + 3 * 10 * CACHED * 4) / 1e9)


def test_the_roofline_is_computing_where_that_takes_longer() -> None:
    roofline = import_module("roofline")
    fast = peaks(1e9, float32=1.0, bfloat16=2.0)
    operations = 2 * 3 * (WEIGHTS + 10 * CACHED)
    for weights, peak in (("float32", 1.0), ("bfloat16", 2.0), ("int8", 1.0)):
        seconds = roofline.step_seconds(fast, SHAPE, 3, 10, weights, 4)
        assert seconds == pytest.approx(operations / peak / 1e9)
    assert roofline.most_tokens(fast, SHAPE, 3, 10, "float32", 4) == pytest.approx(3e9 / operations)
    assert roofline.most_tokens(None, SHAPE, 3, 10, "float32", 4) is None


def test_medians_and_ratios_are_those_of_the_rounds() -> None:
    report = import_module("report")
    mine, other = run("portable", 10.0, 40.0, 30.0), run("llama-f32", 20.0, 10.0)
    assert report.middle(mine) == 30.0
    assert report.middle(run("portable")) is None
    assert report.ratio(mine, other) == (0.5 + 4.0) / 2
    assert report.ratio(mine, run("torch-f32")) is None


def test_a_prefill_below_a_millisecond_has_a_rate() -> None:
    compare = import_module("compare")
    shape = {**SHAPE, "num_attention_heads": 2}
    measured = compare.new_run("native-f32", context=16, users=2, reason=None)

    class Pool:
        def measure(self, *job: object) -> dict[str, float]:
            return {"decode_tok_s": 5.0, "prefill_s": 0.0002}

    compare.measure_once(Pool(), measured, ([], {}), shape, new_tokens=4)
    (found,) = import_module("report").summary([measured], None, shape, 4)
    assert found["prompt_tok_s"] == 160_000


def test_tables_show_what_was_measured() -> None:
    report = import_module("report")
    read = WEIGHTS * 4 * 200 / 1e9
    runs = [
        run("portable", 50.0, 60.0, 10.0, read_gb_s=[read, read, 0.2 * read]),
        run("portable", 120.0, users=8),
        run("llama-f32", 100.0),
        run("native-f32", reason="no compiler"),
        run("native-f32", users=8, reason="no compiler"),
    ]
    fast = peaks(1e9, float32=1e9)
    shown = report.summary(runs, fast, {**SHAPE, "num_layers": 2}, new_tokens=0)
    best = shown[0]["roofline_tok_s"]
    assert best < 200
    assert shown[0]["share_of_roofline"] == pytest.approx(50 / best, abs=1e-3)
    assert shown[1]["share_of_roofline"] is None
    bare = report.summary(runs, None, SHAPE, new_tokens=0)
    assert report.rate_table(bare, 128, [1, 8]).splitlines() == [
        "| decode tok/s (of the roofline), context 128 | 1 user | 8 users |",
        "| --- | ---: | ---: |",
        "| ours, portable | 50.0 | 120.0 |",
        "| llama.cpp F32 | 100.0 | - |",
    ]
    assert report.pair_table(bare, 128, [1, 8]).splitlines()[2:] == [
        "| ours, portable ÷ llama.cpp F32 | 0.50 | - |"
    ]
    assert report.pair_table(bare, 900, [1, 8]) is None
    assert report.left_out(bare) == [
        "left out: ours, native float32 (users at context: 1 at 128, 8 at 128): no compiler"
    ]


def test_prompts_are_tokens_of_all_users_by_the_median_time() -> None:
    report = import_module("report")
    runs = [
        run("openvino", 1.0, users=4, prefill_s=[2.0, 0.5, 1.0]),
        run("llama-file", users=4, prefill_s=[]),
        run("native-stored", 1.0, prefill_s=[0.25]),
    ]
    bare = report.summary(runs, None, SHAPE, new_tokens=0)
    assert report.prompt_table(bare, 128, [1, 4]).splitlines() == [
        "| prefill, tok/s, context 128 | 1 user | 4 users |",
        "| --- | ---: | ---: |",
        "| ours, native, as stored | 512 | - |",
        "| OpenVINO, defaults | - | 512 |",
    ]
    assert report.prompt_table(bare, 900, [1, 4]) is None


def test_ratios_of_prompts_are_those_of_the_rounds() -> None:
    report = import_module("report")
    runs = [
        run("native-stored", 1.0, 1.0, 1.0, prefill_s=[1.0, 2.0, 4.0]),
        run("openvino", 1.0, 1.0, 1.0, prefill_s=[3.0, 1.0, 6.0]),
        run("llama-file", prefill_s=[]),
    ]
    assert report.prompt_pair_table(runs, 128, [1, 4]).splitlines() == [
        "| prefill, median ratio of the rounds, context 128 | 1 user | 4 users |",
        "| --- | ---: | ---: |",
        "| ours, native, as stored ÷ OpenVINO, defaults | 1.50 | - |",
    ]
    assert report.prompt_pair_table(runs, 900, [1, 4]) is None


def test_weights_of_four_bits_bring_their_scales() -> None:
    seconds = import_module("roofline").step_seconds
    slow = peaks(1.0, float32=1e9)
    for weights, block_bytes in {"q4_0": 18, "q4_1": 20}.items():  # of 32, in a GGUF file
        found = seconds(slow, SHAPE, 1, 0, weights, 1)
        assert found == pytest.approx(WEIGHTS / 32 * block_bytes / 1e9)
    q4_k, q6_k = 148, 210  # of 256, in memory
    output = 32 * 8
    read = (WEIGHTS - output) / 256 * q4_k + output / 256 * q6_k
    assert seconds(slow, SHAPE, 1, 0, "int4", 1) == pytest.approx(read / 1e9)


def test_decoding_counts_while_everybody_decodes() -> None:
    decode_rate = import_module("answering").decode_rate
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]) == 4 / 2
    # Whichever user's token of a step is read first.
    assert decode_rate([[0.25, 1.25, 2.25, 3.25], [1.0, 2.0, 3.0, 4.0]]) == pytest.approx(4 / 2)
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [1.25, 2.25, 3.25]]) == pytest.approx(4 / 2)
    # Two tokens that are read at once.
    assert decode_rate([[0.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0]]) == pytest.approx(4.5 / 2)
    with pytest.raises(ValueError, match="new-tokens"):
        decode_rate([[0.0, 1.0], [2.0, 3.0]])
