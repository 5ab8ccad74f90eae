"""`convert`: which way it goes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any, Callable

import pytest
from safetensors.numpy import load_file

from glm_multiuser.model_config import ModelConfig
from tests.checkpoint.folders import (
    CHATGLM2,
    CONFIG,
    MODEL,
    QWEN2,
    arrays_of,
    same,
    their_arrays,
    write_folder,
    write_json,
)
from tests.server.process import ROOT

GLM_TINY = ROOT / "ckpt" / "glm-tiny"
HOW_TO_LOAD = "MindFormers loads it with\n"

Run = Callable[..., Any]


@pytest.fixture
def huggingface(tmp_path: Path) -> Path:
    """A small folder in Hugging Face layout, with a file that is and one that is not taken over."""
    folder = write_folder(tmp_path / "hf", their_arrays())
    write_json(folder / "config.json", CONFIG)
    (folder / "ice_text.model").write_bytes(b"pieces")
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def mindformers(run: Run, huggingface: Path, tmp_path: Path) -> Path:
    """The same, converted."""
    assert run("convert", huggingface, tmp_path / "mf").exit_code == 0
    return tmp_path / "mf"


def refused(result: Any, message: str) -> None:
    """One red line and exit code 2."""
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if not line.startswith("converting ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert result.stdout == ""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_to_mindformers(run: Run, huggingface: Path, tmp_path: Path) -> None:
    result = run("convert", huggingface, tmp_path / "new")
    assert result.exit_code == 0
    files = ["config.json", "ice_text.model", "mindformers_config.json", "model.ckpt"]
    assert names(tmp_path / "new") == files
    listed, program = result.stdout.split(HOW_TO_LOAD)
    assert [line.split()[0] for line in listed.splitlines()[1:] if line] == files
    assert str(tmp_path / "new" / "model.ckpt") in program
    assert result.stderr == f"converting {huggingface} to mindformers ...\n"


def test_to_huggingface(run: Run, mindformers: Path, tmp_path: Path) -> None:
    result = run("convert", mindformers, tmp_path / "new")
    assert result.exit_code == 0
    assert names(tmp_path / "new") == ["config.json", "ice_text.model", "model.safetensors"]
    assert ModelConfig.from_folder(tmp_path / "new") == MODEL
    assert HOW_TO_LOAD not in result.stdout


def test_another_family_to_mindformers(run: Run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", arrays_of(CHATGLM2))
    write_json(folder / "config.json", CHATGLM2)
    result = run("convert", folder, tmp_path / "new")
    assert result.exit_code == 0
    assert names(tmp_path / "new") == ["config.json", "mindformers_config.json", "model.ckpt"]
    program = result.stdout.split(HOW_TO_LOAD)[1]
    assert "import ChatGLM2ForConditionalGeneration, ChatGLM2Config" in program


def test_pytorch_files(run: Run, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed: make torch")
    folder = tmp_path / "bin"
    folder.mkdir()
    arrays = arrays_of(QWEN2)
    tensors = {name: torch.from_numpy(one) for name, one in arrays.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    write_json(folder / "config.json", QWEN2)
    for name in ("merges.txt", "vocab.json"):
        (folder / name).write_text(name)
    refused(run("convert", folder, tmp_path / "new"), "'qwen2' has no .ckpt layout of MindFormers")
    assert run("convert", folder, tmp_path / "new", "--to", "huggingface").exit_code == 0
    files = ["config.json", "merges.txt", "model.safetensors", "vocab.json"]
    assert names(tmp_path / "new") == files
    assert same(load_file(tmp_path / "new" / "model.safetensors"), arrays)
    (folder / "other.ckpt").write_bytes(b"")
    refused(run("convert", folder, tmp_path / "newer"), "has both pytorch_model.bin and .ckpt")


def test_files_of_a_folder_are_not_named_themselves(
    run: Run, huggingface: Path, tmp_path: Path
) -> None:
    for name in ("model.safetensors", "config.json"):
        result = run("convert", huggingface / name, tmp_path / "new")
        refused(result, f"{name} is a file; name its folder {huggingface}")


def test_one_file_with_the_config_of_another_folder(
    run: Run, huggingface: Path, mindformers: Path, tmp_path: Path
) -> None:
    lonely = tmp_path / "training" / "glm_rank_0-100_2.ckpt"
    lonely.parent.mkdir()
    shutil.copyfile(mindformers / "model.ckpt", lonely)
    refused(run("convert", lonely, tmp_path / "new"), "config.json is not there")
    assert not (tmp_path / "new").exists()
    config = huggingface / "config.json"
    result = run("convert", lonely, tmp_path / "new", "--config", config, "--dtype", "float16")
    assert result.exit_code == 0
    assert names(tmp_path / "new") == ["config.json", "ice_text.model", "model.safetensors"]
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert {one.dtype.name for one in written.values()} == {"float16"}


def test_a_folder_with_both_kinds(
    run: Run, huggingface: Path, mindformers: Path, tmp_path: Path
) -> None:
    shutil.copyfile(mindformers / "model.ckpt", huggingface / "other.ckpt")
    refused(run("convert", huggingface, tmp_path / "new"), "say which way with --to")
    for to, weights in (("mindformers", "model.ckpt"), ("huggingface", "model.safetensors")):
        assert run("convert", huggingface, tmp_path / to, "--to", to).exit_code == 0
        assert weights in names(tmp_path / to)


def test_what_cannot_be_converted(
    run: Run, huggingface: Path, mindformers: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    refused(run("convert", tmp_path / "nowhere", new), "no weights at")
    refused(run("convert", huggingface, new, "--to", "torch"), "to is 'torch'")
    refused(run("convert", huggingface, new, "--dtype", "int8"), "dtype is 'int8'")
    already = "has nothing to convert: its weights are {} already"
    for source in (huggingface, mindformers):
        kind = "huggingface" if source == huggingface else "mindformers"
        refused(run("convert", source, new, "--to", kind), already.format(kind))
    write_json(huggingface / "config.json", {**CONFIG, "model_type": "other"})
    refused(run("convert", huggingface, new), "is not a model that can be read")
    write_json(huggingface / "config.json", {**CONFIG, "num_layers": 3})
    refused(run("convert", huggingface, new), "lacks transformer.layers.2.")
    write_json(huggingface / "config.json", {**CONFIG, "deepnorm_layers": 28})
    refused(run("convert", huggingface, new), "deepnorm_layers is 28 and num_layers 2")
    assert names(tmp_path) == ["hf", "mf"]


def test_a_broken_file(run: Run, mindformers: Path, tmp_path: Path) -> None:
    path = mindformers / "model.ckpt"
    path.write_bytes(path.read_bytes()[:-5])
    refused(run("convert", mindformers, tmp_path / "new"), f"{path} is broken, cut short")
    assert not (tmp_path / "new").exists()


def test_files_are_replaced_only_with_force(run: Run, huggingface: Path, mindformers: Path) -> None:
    before = {name: (mindformers / name).read_bytes() for name in names(mindformers)}
    (mindformers / "config.json").write_text("{}")
    (mindformers / "notes.txt").write_text("mine")
    refused(run("convert", huggingface, mindformers), "has files in it already; --force")
    assert (mindformers / "config.json").read_text() == "{}"
    assert run("convert", huggingface, mindformers, "--force").exit_code == 0
    for name, content in before.items():
        assert (mindformers / name).read_bytes() == content
    assert names(mindformers) == sorted([*before, "notes.txt"])
    assert (mindformers / "notes.txt").read_text() == "mine"


def test_chat_templates_are_taken_over(run: Run, huggingface: Path, tmp_path: Path) -> None:
    templates = huggingface / "additional_chat_templates"
    templates.mkdir()
    new = tmp_path / "new" / templates.name
    git = tmp_path / "new" / ".git"
    git.mkdir(parents=True)
    (git / "HEAD").touch()
    for content in ("old", "new"):
        (templates / "tool_use.jinja").write_text(content)
        result = run("convert", huggingface, tmp_path / "new", "--force")
        assert result.exit_code == 0
        assert f"{templates.name}/tool_use.jinja" in result.stdout
        assert ".git" not in result.stdout
        (new / "mine.txt").write_text("mine")  # beside which a file is replaced
        assert (new / "tool_use.jinja").read_text() == content


@pytest.mark.parametrize(
    "name",
    [
        "glm_6b.ckpt",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ],
)
def test_other_weights_would_hide_the_new_ones(
    run: Run, huggingface: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("old")
    result = run("convert", huggingface, tmp_path / "new", "--force")
    refused(result, f"has other weights, {name}, that --force does not replace")
    assert names(tmp_path / "new") == [name]


def test_an_empty_folder_is_filled(run: Run, huggingface: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert run("convert", huggingface, tmp_path / "new").exit_code == 0
    assert "model.ckpt" in names(tmp_path / "new")


def test_a_destination_that_cannot_be_written(
    run: Run, huggingface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    refused(run("convert", huggingface, tmp_path / "file"), "is not a folder")
    refused(run("convert", huggingface, tmp_path / "file" / "new"), "cannot write")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm_multiuser.checkpoint.ckpt_file.shutil.copyfileobj", full_disk)
    refused(run("convert", huggingface, tmp_path / "new"), "No space left on device")
    assert names(tmp_path) == ["file", "hf"]


@pytest.mark.skipif(find_spec("mindformers") is None, reason="MindFormers is not installed")
def test_the_printed_program_loads_it(run: Run, tmp_path: Path) -> None:
    result = run("convert", GLM_TINY, tmp_path / "new")
    program = dedent(result.stdout.split(HOW_TO_LOAD)[1])
    check = "\nimport numpy; print('sum', numpy.float64(model.lm_head.weight.asnumpy()).sum())"
    child = subprocess.run(
        [sys.executable, "-c", program + check], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr
    weights = load_file(GLM_TINY / "model.safetensors")["lm_head.weight"]
    assert float(child.stdout.split("sum ")[1]) == weights.astype("f8").sum()
