"""`benchmarks/peers`: which peers read a GGUF file, and how they are asked."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm_multiuser.errors import ConfigError, GLMMultiUserError
from tests.server.process import ROOT

OPTIONS = {"llama_options": "--flash-attn off", "new_tokens": 2, "repeat": 2, "avx2": False}
SHAPE = {"hidden_size": 8, "inner_hidden_size": 16, "num_layers": 2, "vocab_size": 32}
WORKER = """
import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"start_s": 1.0}), flush=True)
for _ in sys.stdin:
    rate = len(job["settings"]["model"]) * job["users"]
    found = {"decode_tok_s": rate, "prefill_s": job["context"] / 64, "peak_mb": 1}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(autouse=True)
def find_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files find each other as when it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")


def test_everybody_reads_the_same_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compare = import_module("compare")
    monkeypatch.setattr(compare, "batched_bench", lambda avx2: Path("avx2" if avx2 else "bench"))
    monkeypatch.setattr(compare, "python_of", lambda name: Path(name) / "python")
    file = tmp_path / "some.gguf"
    names = compare.parse_variants(None, file)
    assert {"native-stored", "native-f32", "native-int8", "llama-file", "openvino"} <= set(names)
    commands, absent = compare.prepare_all(names, SHAPE, Namespace(model=file, **OPTIONS))
    assert not absent
    assert {settings["model"] for _, settings in commands.values()} == {str(file)}
    assert commands["openvino"][0][0] == "openvino/python"
    assert commands["llama-file"][1]["program"] == "bench"


def test_with_avx2_nobody_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = import_module("compare")
    monkeypatch.setattr(compare, "batched_bench", lambda avx2: Path("avx2" if avx2 else "bench"))
    names = ["native-f32", "llama-f32", "torch-bf16", "portable", "mindformers"]
    monkeypatch.setattr(compare, "gguf", lambda shape, kind: Path(kind))
    limited = Namespace(model=None, **{**OPTIONS, "avx2": True})
    commands, absent = compare.prepare_all(names, SHAPE, limited)
    assert set(commands) == {"native-f32", "llama-f32"}
    assert commands["llama-f32"][1]["program"] == "avx2"
    others = names[2:]
    assert absent == dict.fromkeys(others, "it is not limited to AVX2")


def test_variants_are_those_of_the_model() -> None:
    compare = import_module("compare")
    file = Path("some.gguf")
    for text, model in (("llama-q4_0", file), ("openvino", None), ("unheard-of", None)):
        with pytest.raises(ConfigError, match=f"variants is '{text}'"):
            compare.parse_variants(text, model)
    assert compare.parse_variants("llama-q4_0,llama-q4_1", None) == ["llama-q4_0", "llama-q4_1"]
    with pytest.raises(ConfigError, match="must be a GGUF file"):
        compare.shape_of(file)


def test_rounds_of_workers_become_runs(capsys: pytest.CaptureFixture[str]) -> None:
    compare, report = import_module("compare"), import_module("report")
    names = ["llama-file", "openvino"]
    commands: dict[str, Any] = {
        "llama-file": ([sys.executable, "-c", WORKER], {"model": "four"}),
        "openvino": ([sys.executable, "-c", "raise SystemExit"], {"model": "four"}),
    }
    runs = [compare.new_run(name, 128, 3, None) for name in names]
    compare.measure_cell(runs, commands, SHAPE, Namespace(**OPTIONS), reading=False)
    good, bad = report.summary(runs, None, SHAPE, 2)
    assert good["rounds"] == [12, 12]
    assert good["prompt_tok_s"] == 192.0
    assert bad["reason"] == "its process died"
    assert bad["prompt_tok_s"] is None
    json.dumps([good, bad])  # the last line of the output


def test_openvino_counts_tokens_after_the_step_that_made_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second user's prompt enters a step later, so the first one is a token ahead."""
    clock = iter(range(100))
    waiting: list[list[int]] = []

    class Handle:
        def __init__(self, late: int) -> None:
            self.made, self.late = 0, late

        def can_read(self) -> bool:
            return self.made > 0

        def read(self) -> dict[int, Any]:
            found = {0: SimpleNamespace(generated_ids=[7] * self.made)}
            self.made = 0
            return found

    class Pipeline:
        def __init__(self) -> None:
            self.handles: list[Handle] = []
            self.steps = 0

        def add_request(self, number: int, prompt: Any, generation: Any) -> Handle:
            assert generation.ignore_eos
            waiting.append(list(prompt[0]))
            self.handles.append(Handle(number))
            return self.handles[-1]

        def has_non_finished_requests(self) -> bool:
            return self.steps < 4

        def step(self) -> None:
            self.steps += 1
            for handle in self.handles:
                handle.made += self.steps > handle.late

    fake = SimpleNamespace(GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    worker = import_module("openvino_worker")
    monkeypatch.setattr(worker.time, "perf_counter", lambda: float(next(clock)))
    prompts = worker.np.arange(6).reshape(2, 3)
    found = worker.batched_round(Pipeline(), prompts, 3)
    assert waiting == [[0, 1, 2], [3, 4, 5]]
    # Asked at 0, steps end at 1 to 4: all users decode from 2 to 4, two tokens each.
    assert found == {"decode_tok_s": 4 / 2, "prefill_s": 2.0, "ahead": 1}


def test_the_sizes_of_tiles_are_kept_once(tmp_path: Path) -> None:
    prepare = import_module("prepare")
    path = tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    path.parent.mkdir(parents=True)
    path.write_text("    tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n    done = true;\n")
    for _ in range(2):
        prepare.keep_tile_config(tmp_path)
        lines = path.read_text().splitlines()
        assert [line.split("(")[0].strip() for line in lines[1:3]] == [
            "__asm__ volatile",
            "_tile_loadconfig",
        ]
        assert len(lines) == 4
    path.write_text("something else")
    with pytest.raises(GLMMultiUserError, match="another way"):
        prepare.keep_tile_config(tmp_path)


def test_llama_cpp_is_asked_again_when_it_ended_without_a_result(tmp_path: Path) -> None:
    worker = import_module("llama_cpp_worker")
    program, marks = tmp_path / "bench", tmp_path / "runs"
    found = {"speed_tg": 5.0, "t_pp": 2.0}
    program.write_text(f"""#!/bin/sh
echo run >> {marks}
if [ $(wc -l < {marks}) -gt 1 ]; then echo '{json.dumps(found)}'; fi
""")
    program.chmod(0o755)
    settings = {"program": str(program), "model": "some.gguf", "options": "--flash-attn off"}
    job = {"context": 4, "new_tokens": 2, "users": 1, "threads": 1, "settings": settings}
    with ExitStack() as at_end:
        measured = worker.start(job, at_end)[1]()
    assert (measured["decode_tok_s"], measured["prefill_s"]) == (5.0, 2.0)
    assert marks.read_text() == "run\nrun\n"
