"""What cannot work is one line and exit code 2, before a model is loaded or a process started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli import bench
from tests.cli.fake import WITH_FAKE_MODEL, FakeLLM
from tests.server.process import ROOT

GOLDEN = ROOT / "tests" / "golden"
NOWHERE = "/nonexistent/x.png"
MODEL_COMMANDS = (
    *("demo", "chat", "generate", "serve", "selfcheck"),
    "bench --checkpoint ckpt/glm-tiny",
)
WRONG = {
    "--users 1000000": "users is 1000000; it must be between 1 and 1024",
    "--seq-length 1048576": "seq_length is 1048576; this model's max_sequence_length is 2048",
    "--weight-dtype int3": "weight_dtype is 'int3'; it must be one of float32, bfloat16,",
    "--kernels fast": "kernels is 'fast'; it must be one of auto, native, portable",
    "--kernels portable --dtype float16 --users-per-cell 9": "users_per_cell is 9; it must be",
    "--session-dir ~nobody-here/x": "session_dir is '~nobody-here/x'; there is no such user",
    "--session-dir /dev/null": "session_dir is '/dev/null', but sessions cannot be kept there: ",
    "--weight-cache ~nobody-here/x": "weight_cache is '~nobody-here/x'; there is no such user",
    "--kernels native --dtype float16": "kernels is 'native', but they compute in float32",
}
NOT_THERE = {
    "demo": (),
    "chat": (),
    "generate": (),
    "serve": (),
    "selfcheck": (
        *("--users", "--seq-length"),
        *("--dtype", "--weight-dtype", "--compute-dtype", "--cache-dtype"),
    ),
    "bench": (),
}
OUTPUTS = {
    "generate --out /nonexistent/x": "cannot write /nonexistent/x: No such file or directory",
    "generate --out /": "cannot write /: Is a directory",
    "plan --json /nonexistent/x": "cannot write /nonexistent/x: No such file or directory",
    f"plan --sweep --plot {NOWHERE}": f"cannot write {NOWHERE}: No such file or directory",
    "plan --sweep --plot x.txt": "plot is 'x.txt'; its name must end with .png, .svg, .pdf",
    "bench --session-dir /dev/null/x": "session_dir is '/dev/null/x', but sessions cannot be",
    f"bench --plot {NOWHERE}": f"cannot write {NOWHERE}: No such file or directory",
    "plan --sweep --plot /nonexistent/X.PNG": "cannot write /nonexistent/X.PNG",
    "generate --out answers.jsonl --checkpoint nowhere": "no checkpoint at nowhere",
    "bench --plot x": "plot is 'x'; its name must end with .png, .svg, .pdf",
    "bench --json / --no-plot": "cannot write /: Is a directory",
    "serve --cors-origin example.com": "--cors-origin has 'example.com'; an origin is scheme://",
    "serve --cors-origin https://example.com/": "--cors-origin has 'https://example.com/'; an",
    "serve --cors-origin https://*.example.com": "--cors-origin has 'https://*.example.com'; an",
    "serve --cors-origin https://Example.com": "--cors-origin has 'https://Example.com'; an",
    "serve --cors-origin http://example.com:80": "--cors-origin has 'http://example.com:80'; an",
    "serve --request-timeout 0": "--request-timeout is 0.0; it must be more than 0",
    "serve --root-path glm": "root_path is 'glm'; it must be a path",
    f"serve --host {'a' * 70}": "cannot listen on host",
    "chat --temperature -1": "temperature is -1",
    "chat --checkpoint " + 300 * "a": "no checkpoint at aaa",
}


@pytest.fixture
def opened(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[FakeLLM]]:
    def run_all(settings: object) -> None:
        raise AssertionError("starts processes")

    monkeypatch.setattr(bench, "run_all", run_all)
    monkeypatch.chdir(tmp_path)
    yield fake_llm.opened
    assert not any(tmp_path.iterdir())


def refused(result: Any, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", MODEL_COMMANDS)
@pytest.mark.parametrize("options", WRONG)
def test_settings(
    run: Callable[..., Any], opened: list[FakeLLM], command: str, options: str
) -> None:
    words = [*command.split(), *options.split()]
    if any(option in words for option in NOT_THERE[words[0]]):
        pytest.skip("it has no such option")
    refused(run(*words, stdin="a\n"), WRONG[options])
    assert opened == []


@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_and_addresses(
    run: Callable[..., Any], opened: list[FakeLLM], command: str
) -> None:
    refused(run(*command.split(), stdin="a\n"), OUTPUTS[command])
    assert opened == []


@pytest.mark.parametrize("command", ["demo", "chat"])
@pytest.mark.parametrize("base", [False, True])
def test_a_model_that_cannot_be_asked_a_question(
    run: Callable[..., Any],
    opened: list[FakeLLM],
    tmp_path_factory: pytest.TempPathFactory,
    command: str,
    base: bool,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(GOLDEN / "llama" / name)
    if base:
        vocabulary = json.loads((GOLDEN / "tokenizer_json" / "llama_spm.json").read_text("utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary["tokenizer"]), "utf-8")
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}', "utf-8")
    problem = "this checkpoint has no chat template" if base else f"{folder} has no tokenizer"
    refused(run(command, "--checkpoint", folder, stdin="a\n"), problem)
    assert opened == []


def test_a_port_in_use(run: Callable[..., Any], opened: list[FakeLLM]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("serve", "--port", port), f"cannot listen on host '127.0.0.1', port {port}")


def real_command(*words: str, stdout: Any, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", WITH_FAKE_MODEL, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        input="谁\nyou\n",
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        timeout=60,
    )


@pytest.mark.parametrize("command", ["--help", "plan", "generate", "chat"])
def test_a_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        child = real_command(*command.split(), stdout=full)
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "Traceback" not in child.stderr
    assert "Exception" not in child.stderr


@pytest.mark.parametrize("command", ["plan", "generate", "demo"])
def test_an_encoding_that_lacks_characters(command: str) -> None:
    child = real_command(*command.split(), stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1")
    assert child.returncode == 0, child.stderr
    if command == "generate":
        assert child.stdout.splitlines()[0].startswith(r'{"index": 0, "prompt": "\u8c01"')


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        child = real_command("generate", stdout=closed)
    assert child.returncode == 1
    assert "rror" not in child.stderr
    assert "Exception" not in child.stderr
