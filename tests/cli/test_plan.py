"""How many users fit: arithmetic on shapes, checked by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser import memory
from glm_multiuser.backends.native import library
from glm_multiuser.cli.plan_tables import millions
from glm_multiuser.cli.published import PUBLISHED
from glm_multiuser.sizes import bytes_of


@pytest.mark.parametrize(
    ("name", "kib_per_token", "billions"),
    [
        ("chatglm-6b", 448, 6.71),
        ("chatglm2-6b", 28, 6.24),
        ("chatglm3-6b", 28, 6.24),
        ("glm-4-9b-chat", 40, 9.40),
        ("qwen2-0.5b", 12, 0.494),
        ("qwen2-1.5b", 28, 1.544),
        ("qwen2.5-3b", 36, 3.086),
        ("qwen2-7b", 56, 7.616),
        ("qwen2.5-14b", 192, 14.77),
        ("qwen2.5-32b", 256, 32.76),
    ],
)
def test_published_models(name: str, kib_per_token: float, billions: float) -> None:
    config = PUBLISHED[name]
    assert memory.cache_bytes_per_user(config, 1, "float16") == kib_per_token * 1024
    assert memory.weight_count(config) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_what_it_prints(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run("plan", "--model", "chatglm3-6b", "--device-memory", "32GiB", "--json", file)
    assert result.exit_code == 0, result.output
    assert "28 KiB" in result.stdout
    assert "56 MiB" in result.stdout  # 2048 tokens
    assert "11.63 GiB" in result.stdout
    assert "roofline" in result.stdout
    users = json.loads(file.read_text(encoding="utf-8"))["users"]
    assert users > 19  # decode steps of three sizes, 1, 2, 4 or 8 blocks; chunks of five lengths
    assert (
        f"Start-up compiles 40 graphs for {users} users, whatever they ask: 20 to prefill, "
        "8 to replace a block of the caches, 12 to decode. All of them before the first request, "
        "none later." in result.stdout
    )


def test_an_unknown_model_lists_the_known_ones(run: Callable[..., Any]) -> None:
    result = run("plan", "--model", "foo")
    assert result.exit_code == 2
    assert (
        "model is 'foo'; it must be a folder with config.json, a GGUF file, or one of "
        in result.stderr
    )
    assert all(name in result.stderr for name in PUBLISHED)


def test_a_model_that_does_not_fit(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("plan", "--model", "glm-4-9b-chat", "--seq-length", "512", "--json", file)
    small = run(*words, "--device-memory", "16GiB")
    assert small.exit_code == 0, small.output
    plan = json.loads(file.read_text(encoding="utf-8"))
    assert plan["users"] == 0
    needed = plan["total_bytes"]
    assert (
        "glm-4-9b-chat does not fit on 910A: with one user of 512 tokens it takes "
        f"{needed / 2**30:.4g} GiB, and there are 16 GiB." in small.stdout
    )
    assert "does not fit" not in run(*words, "--device-memory", needed).stdout
    assert "does not fit" in run(*words, "--device-memory", needed - 1).stdout


@pytest.mark.parametrize(
    ("count", "text"), [(4_206_592, "4.21 million"), (6_710_000_000, "6.71 billion")]
)
def test_weights_are_counted_in_millions_or_billions(count: int, text: str) -> None:
    assert millions(count) == text


def test_a_checkpoint_folder(run: Callable[..., Any], glm_tiny: Any) -> None:
    result = run("plan", "--model", glm_tiny, "--seq-length", "512", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "8 KiB" in result.stdout  # 2 * 4 layers * 256 * 4 bytes


def test_matrices_are_planned_as_they_are_stored(
    run: Callable[..., Any], tmp_path: Path, glm_tiny: Any
) -> None:
    if library.unavailable_reason("CPU"):
        pytest.skip("there are no native kernels")
    file, folder = tmp_path / "plan.json", tmp_path / "only config"
    folder.mkdir()
    values = json.loads((glm_tiny / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**values, "torch_dtype": "bfloat16"}))
    words = ("plan", "--device", "CPU", "--device-memory", "64GiB", "--json", file, "--seq-length")
    for model, stored in {
        str(glm_tiny): "float16",
        str(folder): "bfloat16",
        "chatglm3-6b": "float16",
        "qwen2-0.5b": "bfloat16",
    }.items():
        for chosen, expected in ((), stored), (("--weight-dtype", "float32"), "float32"):
            assert run(*words, "512", "--model", model, *chosen).exit_code == 0
            plan = json.loads(file.read_text(encoding="utf-8"))
            assert plan["weight_dtype"] == expected
            number = plan["weight_bytes"] / plan["weight_count"]
            assert number == pytest.approx(memory.BYTES[expected], rel=0.02)


def test_smaller_caches_leave_room_for_more_users(run: Callable[..., Any], tmp_path: Path) -> None:
    if library.unavailable_reason("CPU"):
        pytest.skip("there are no native kernels")
    file = tmp_path / "plan.json"
    words = ("plan", "--device", "CPU", "--device-memory", "40GB", "--json", file, "--model")
    found = {}
    for chosen in ((), ("--cache-dtype", "bfloat16"), ("--cache-dtype", "int8")):
        result = run(*words, "chatglm-6b", *chosen, "--bandwidth", "30GB", "--compute", "1")
        assert result.exit_code == 0, result.output
        plan = json.loads(file.read_text(encoding="utf-8"))
        found[plan["cache_dtype"]] = plan
        assert f" in {plan['cache_dtype']}" in result.stdout
    per_token = {name: plan["bytes_per_token"] for name, plan in found.items()}
    # Twice 28 layers of 32 heads of 128 numbers; with int8 a scale of 4 bytes for each head.
    heads = 2 * 28 * 32
    assert per_token == {"float32": heads * 512, "bfloat16": heads * 256, "int8": heads * 132}
    assert found["float32"]["users"] < found["bfloat16"]["users"] < found["int8"]["users"]
    read = [plan["decode_steps"][0]["bytes_read"] for plan in found.values()]
    assert read[0] - read[1] == 2048 * heads * 256
    assert read[1] - read[2] == 2048 * heads * (256 - 132)


@pytest.mark.parametrize(("seq_length", "field", "least"), [(1024, 17, 30), (2048, 10, 15)])
def test_a_32_gb_card_holds_more_users_than_the_published_service(
    run: Callable[..., Any], tmp_path: Path, seq_length: int, field: int, least: int
) -> None:
    """Another implementation of ChatGLM-6B had 17 users at 1,024 tokens, 10 at 2,048, on a 910A."""
    file = tmp_path / "plan.json"
    words = ["--model", "chatglm-6b", "--device-memory", "32GB", "--json", file]
    result = run("plan", *words, "--seq-length", seq_length)
    assert result.exit_code == 0, result.output
    plan = json.loads(file.read_text(encoding="utf-8"))
    assert plan["dtype"] == plan["weight_dtype"] == "float16"
    assert plan["users"] >= least > field
    assert plan["total_bytes"] <= 32 * 10**9 < plan["total_bytes"] + plan["bytes_per_user"]
    assert [step["users"] for step in plan["decode_steps"]][-1] == plan["users"]


@pytest.mark.parametrize(
    ("budget", "named", "users"),
    # 448 MiB each: 18 in 8 GiB, of which the device, beside the weights, has room for 9.
    [("100GiB", "16 GiB", "9"), ("8GiB", "16 GiB", "9"), ("3GiB", "3 GiB", "6")],
)
def test_users_are_those_of_the_lesser_limit(
    run: Callable[..., Any], budget: str, named: str, users: str
) -> None:
    words = ("plan", "--device", "CPU", "--device-memory", "16GiB", "--seq-length", "8192")
    printed = run(*words, "--cache-memory", budget).output
    assert re.search(rf"│ users in {named} +│ {users} ", printed), printed


def test_the_example_of_the_documentation(run: Callable[..., Any]) -> None:
    text = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    words = ("plan", "--model", "chatglm-6b", "--device-memory", "32GiB", "--seq-length", 1024)
    printed = dict(re.findall(r"│ (\w+) .*? │ ([\d.]+)", run(*words).stdout))
    for name in ("workspace", "users"):
        row = re.search(rf"^\| {name} .*\| (\d+)[^|]*\|$", text, re.MULTILINE)
        assert row is not None
        assert int(row[1]) == round(float(printed[name]))


def test_a_cpu_has_a_roofline_only_if_it_is_told_how_fast_it_is(run: Callable[..., Any]) -> None:
    words = ("plan", "--device", "CPU", "--kernels", "portable", "--device-memory", "64GiB")
    assert "roofline" not in run(*words).stdout
    assert "roofline" in run(*words, "--bandwidth", "30GB", "--compute", "0.2").stdout


@pytest.mark.parametrize(
    ("words", "missing"),
    [(["--bandwidth", "30GB"], "compute"), (["--compute", "0.23"], "bandwidth")],
)
def test_half_a_roofline_is_refused(
    run: Callable[..., Any], words: list[str], missing: str
) -> None:
    result = run("plan", "--device", "CPU", *words)
    assert result.exit_code == 2
    assert f"{missing} is not given" in result.stderr
    assert run("plan", "--device", "910A", *words).exit_code == 0


@pytest.mark.slow
def test_the_sweep_is_a_table_and_a_picture(run: Callable[..., Any], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    words = ("plan", "--model", "chatglm-6b", "--sweep", "--plot", picture)
    result = run(*words, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    swept = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["sweep"]
    assert [one["seq_length"] for one in swept] == [128, 256, 512, 1024, 2048]
    users = [one["users"] for one in swept]
    assert users == sorted(users, reverse=True)
    nobody = run(*words, "--device-memory", "1GiB")
    assert nobody.exit_code == 2
    assert "cache-memory or device-memory holds no user" in nobody.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "budget"), [("64GiB", "8GiB"), ("64GiB", "100MiB"), ("16GiB", "8GiB")]
)
def test_the_sweep_has_the_users_of_the_plan(
    run: Callable[..., Any], tmp_path: Path, memory: str, budget: str
) -> None:
    if library.unavailable_reason("CPU"):
        pytest.skip("there are no native kernels")
    file = tmp_path / "plan.json"
    limits = ("--device-memory", memory, "--cache-memory", budget)
    speed = ("--device", "CPU", "--bandwidth", "30GB", "--compute", "1")
    words = ("plan", "--sweep", "--seq-length", "8192", *limits, *speed)
    result = run(*words, "--plot", tmp_path / "plan.png", "--json", file)
    assert result.exit_code == 0, result.output
    plan = json.loads(file.read_text(encoding="utf-8"))
    (row,) = (one for one in plan["sweep"] if one["seq_length"] == 8192)
    assert row["users"] == plan["users"]
    rates = [step["tokens_per_second"] for step in plan["decode_steps"]]
    assert row["tokens_per_second"] == (rates[-1] if rates else None)
    users = [one["users"] for one in plan["sweep"]]
    assert users == sorted(users, reverse=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "H100"], "device is 'H100'; it must be one of 910A, 910B, CPU"),
        (["--device-memory", "0"], "device-memory is '0'; it must be from 1 byte"),
        (["--device-memory", "9" * 30], "it must be from 1 byte"),
        (["--bandwidth", "fast"], "bandwidth is 'fast'; it must be a number"),
        (["--compute", "0"], "compute is 0.0; it must be above 0"),
        (["--compute", "nan"], "compute is nan; it must be above 0"),
        (["--context", "2049"], "context is 2049; it must be between 1 and seq-length 2048"),
        (["--seq-length", "9000"], "max_sequence_length is 8192"),
        (["--weight-dtype", "int8"], "weight_dtype 'int8' needs native kernels, but"),
        (["--compute-dtype", "bfloat16"], "compute_dtype 'bfloat16' needs native kernels, but"),
        (["--cache-dtype", "int8"], "cache_dtype 'int8' needs native kernels, but"),
        (["--kernels", "native"], "kernels is 'native', but they are for the CPU"),
    ],
)
def test_values_that_are_refused(run: Callable[..., Any], words: list[str], told: str) -> None:
    result = run("plan", *words)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize("text", ["", "many", "3 apples", "-1GiB", "1e999GiB"])
def test_sizes_that_are_none(run: Callable[..., Any], text: str) -> None:
    result = run("plan", "--device-memory", text)
    assert result.exit_code == 2
    assert f"device-memory is {text!r}; it must be a number of bytes" in result.stderr
    assert "KiB, MiB, GiB, TiB, kB, MB, GB, TB" in result.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("1024", 1024), ("1.5 GiB", 3 * 2**29), ("2MB", 2_000_000)]
)
def test_sizes(text: str, count: int) -> None:
    assert bytes_of("device-memory", text) == count
