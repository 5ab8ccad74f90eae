"""Memory of graphs of MindSpore's operators: `plan` against a simulated 910A.

Measured by `python -m benchmarks.ascend_memory` with MindSpore 2.7.2.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ascend_memory
from benchmarks.ascend_memory import LIMIT, MIB, MODELS
from glm_multiuser import EngineConfig, memory
from glm_multiuser.engine import graph_memory
from scripts.ascend_dryrun import stubs

ENGINE = EngineConfig(dtype="float16", device_target="Ascend")
SEEN: dict[tuple[str, int, int, int], float] = {
    ("chatglm-6b", 2, 8, 1024): 400.5,
    ("chatglm3-6b", 2, 8, 1024): 99.0,
    ("glm-4-9b-0414", 2, 8, 1024): 99.0,
    ("tinyllama-1.1b", 2, 8, 1024): 98.0,
    ("qwen2-1.5b", 2, 8, 1024): 37.8,
    ("qwen3-0.6b", 2, 8, 1024): 52.1,
    ("chatglm-6b", 2, 32, 1024): 400.5,
    ("chatglm3-6b", 2, 32, 1024): 99.0,
    ("glm-4-9b-0414", 2, 32, 1024): 99.0,
    ("tinyllama-1.1b", 2, 32, 1024): 98.0,
    ("qwen2-1.5b", 2, 32, 1024): 37.8,
    ("qwen3-0.6b", 2, 32, 1024): 52.1,
    ("chatglm-6b", 2, 8, 2048): 1569.0,
    ("chatglm3-6b", 2, 8, 2048): 196.0,
    ("glm-4-9b-0414", 2, 8, 2048): 196.0,
    ("tinyllama-1.1b", 2, 8, 2048): 195.0,
    ("qwen2-1.5b", 2, 8, 2048): 74.8,
    ("qwen3-0.6b", 2, 8, 2048): 104.2,
    ("chatglm-6b", 2, 32, 2048): 1569.0,
    ("chatglm3-6b", 2, 32, 2048): 196.0,
    ("glm-4-9b-0414", 2, 32, 2048): 196.0,
    ("tinyllama-1.1b", 2, 32, 2048): 195.0,
    ("qwen2-1.5b", 2, 32, 2048): 74.8,
    ("qwen3-0.6b", 2, 32, 2048): 104.2,
    ("chatglm-6b", 4, 8, 1024): 400.5,
    ("chatglm3-6b", 4, 8, 1024): 99.0,
    ("glm-4-9b-0414", 4, 8, 1024): 99.0,
    ("tinyllama-1.1b", 4, 8, 1024): 98.0,
    ("qwen2-1.5b", 4, 8, 1024): 37.8,
    ("qwen3-0.6b", 4, 8, 1024): 52.1,
    ("chatglm-6b", 4, 32, 2048): 1569.0,
    ("chatglm3-6b", 4, 32, 2048): 196.0,
    ("glm-4-9b-0414", 4, 32, 2048): 196.0,
    ("tinyllama-1.1b", 4, 32, 2048): 195.0,
    ("qwen2-1.5b", 4, 32, 2048): 74.8,
    ("qwen3-0.6b", 4, 32, 2048): 104.2,
    ("chatglm-6b", 4, 32, 1024): 400.5,
    ("chatglm3-6b", 4, 32, 1024): 99.0,
    ("glm-4-9b-0414", 4, 32, 1024): 99.0,
    ("tinyllama-1.1b", 4, 32, 1024): 98.0,
    ("qwen2-1.5b", 4, 32, 1024): 37.8,
    ("qwen3-0.6b", 4, 32, 1024): 52.1,
    ("chatglm-6b", 4, 8, 2048): 1569.0,
    ("chatglm3-6b", 4, 8, 2048): 196.0,
    ("glm-4-9b-0414", 4, 8, 2048): 196.0,
    ("tinyllama-1.1b", 4, 8, 2048): 195.0,
    ("qwen2-1.5b", 4, 8, 2048): 74.8,
    ("qwen3-0.6b", 4, 8, 2048): 104.2,
    ("qwen3-0.6b", 28, 8, 256): 55.5,
    ("chatglm3-6b", 2, 8, 128): 16.4,
    ("tinyllama-1.1b", 2, 256, 256): 47.9,
    ("qwen3-0.6b", 2, 128, 2048): 150.2,
    ("chatglm-6b", 2, 8, 128): 19.1,
}
"""Model, layers, users, tokens of each -> MiB of the largest step."""


@pytest.mark.parametrize("setup", SEEN, ids=lambda setup: "-".join(map(str, setup)))
def test_the_largest_step_is_the_one_that_was_seen(setup: tuple[str, int, int, int]) -> None:
    model, layers, users, tokens = setup
    config = replace(MODELS[model], num_layers=layers)
    planned = memory.step_bytes(config, replace(ENGINE, users=users, seq_length=tokens))
    assert planned / MIB == pytest.approx(SEEN[setup], rel=0.05)


def test_only_blocks_that_are_replaced_are_of_all_layers() -> None:
    engine, number = replace(ENGINE, users=8, seq_length=2048), 2
    for config in MODELS.values():
        few, many = replace(config, num_layers=2), replace(config, num_layers=32)
        for need in (graph_memory.prompt_step, graph_memory.decode_step, graph_memory.output_step):
            assert need(few, engine, number) == need(many, engine, number)
        blocks = [graph_memory.replace_step(one, engine, number) for one in (few, many)]
        assert blocks[1] == 16 * blocks[0]


def test_each_graph_has_rotary_tables_of_its_own() -> None:
    config, engine = MODELS["chatglm3-6b"], replace(ENGINE, users=8, seq_length=1024)
    # Chunks of five lengths and batches of two sizes, each over 256, 512 and 1,024 positions.
    tables = (5 + 2) * 3 * 2 * 2049 * 128 * 2
    zeros = (5 * 3 * 256 + 3 * (2 + 8)) * 2 * 128 * 2
    assert memory.constant_bytes(config, engine) == tables + zeros
    longer = replace(engine, seq_length=8192)
    assert graph_memory.table_bytes(config, longer, 2) == 2 * 8193 * 128 * 2


def test_cells_of_their_own_need_no_copies() -> None:
    config, engine = MODELS["qwen3-0.6b"], replace(ENGINE, users=128, seq_length=2048)
    apart = replace(engine, users_per_cell=8)
    assert graph_memory.decode_step(config, apart, 2) < graph_memory.decode_step(config, engine, 2)


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_a_prompt_copies_one_layer_at_a_time(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("g++", "nm"))):
        pytest.skip("there is no g++ or no nm to build the stubs with")
    run = ascend_memory.start(stubs.build(tmp_path), "qwen3-0.6b", 8, 8, 1024, 0)
    assert run["step"] == pytest.approx(run["step_seen"], rel=LIMIT)
