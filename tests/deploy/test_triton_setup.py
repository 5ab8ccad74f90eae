"""What is settled before a Triton server runs: parameters, repository, options, and recovery."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from pathlib import Path
from typing import Any, Optional

import mindspore  # noqa: F401  before anything that imports protobuf
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import deserialize_bytes_tensor
from typer.testing import CliRunner

from glm_multiuser.cli.commands import app
from glm_multiuser.deploy import triton_run, triton_supervisor
from glm_multiuser.deploy.triton_parameters import engine_arguments
from glm_multiuser.deploy.triton_repository import MODELS, REPOSITORY, write_repository
from glm_multiuser.deploy.triton_supervisor import Supervisor
from glm_multiuser.errors import ConfigError
from glm_multiuser.server import logs
from glm_multiuser.server.kserve.signature import INPUTS, OUTPUTS
from tests.server.process import ROOT

FOLDER = Path("/models/chatglm")


def given(**texts: str) -> dict[str, Any]:
    return {name: {"string_value": text} for name, text in texts.items()}


def config_of(folder: Path) -> Any:
    text = (folder / "config.pbtxt").read_text("utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_parameters_become_arguments_of_the_engine() -> None:
    parameters = given(
        checkpoint="../weights", users="4", cache_prompt="False", kernels="", FORCE_CPU="yes"
    )
    assert engine_arguments(parameters, FOLDER) == {
        "folder": FOLDER / "../weights",
        "users": 4,
        "cache_prompt": False,
    }
    assert engine_arguments(given(checkpoint="/w"), FOLDER) == {"folder": Path("/w")}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"checkpoint": "c", "users": "many"}, "parameters.users: .*whole|integer.*'many'"),
        ({"checkpoint": "c", "cache_prompt": "maybe"}, "parameters.cache_prompt: .*'maybe'"),
        ({"checkpoint": "c", "slots": "4"}, "parameters.slots: unknown field"),
        ({"checkpoint": " "}, "parameters.checkpoint: Field required"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(texts: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_arguments(given(**texts), FOLDER)


def test_a_path_that_the_interpreter_cannot_write_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("ascii"))
    with pytest.raises(ConfigError, match=r"parameters.checkpoint is .* names in ascii only"):
        engine_arguments(given(checkpoint="/模型"), FOLDER)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_tensors_of_our_own_server(model: str) -> None:
    config = config_of(REPOSITORY / model)
    types = {"BYTES": "TYPE_STRING", "INT16": "TYPE_INT16"}
    expected = [(one.name, types[one.datatype], one.optional) for one in INPUTS]
    data_type = model_config_pb2.DataType.Name
    assert [(one.name, data_type(one.data_type), one.optional) for one in config.input] == expected
    names = [one.name for one in config.output]
    assert names[:2] == [one.name for one in OUTPUTS]
    assert names[2:] == (["finish_reason"] if model == "chatglm_stream" else [])
    assert all(list(one.dims) == [1] for one in [*config.input, *config.output])
    assert config.model_transaction_policy.decoupled is (model == "chatglm_stream")
    engine_arguments(
        {name: {"string_value": one.string_value} for name, one in config.parameters.items()},
        REPOSITORY / model,
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_warm_up_is_a_question(model: str) -> None:
    folder = REPOSITORY / model
    (warm_up,) = config_of(folder).model_warmup
    texts = {}
    for name, given_input in warm_up.inputs.items():
        data = (folder / "warmup" / given_input.input_data_file).read_bytes()
        (text,) = deserialize_bytes_tensor(data)
        texts[name] = text.decode()
    assert texts == {
        "prompt": "你好",
        "history": '[["hello", "Hi!"]]',
        "temperature": "0",
        "max_token": "8",
    }


def test_the_default_checkpoint_is_found_from_the_models_folder() -> None:
    for model in MODELS:
        folder = REPOSITORY / model
        text = config_of(folder).parameters["checkpoint"].string_value
        assert (folder / text).resolve() == ROOT / "ckpt/glm-tiny"


def test_a_copy_of_the_repository_has_other_parameters(tmp_path: Path) -> None:
    write_repository(tmp_path / "copy", {"users": 3, "weight_dtype": None, "checkpoint": "/模型"})
    for model in MODELS:
        old = config_of(REPOSITORY / model)
        new = config_of(tmp_path / "copy" / model)
        assert new.parameters["users"].string_value == "3"
        assert new.parameters["weight_dtype"].string_value == ""
        assert new.parameters["checkpoint"].string_value == "/模型"
        for name in ("users", "weight_dtype", "checkpoint"):
            new.parameters[name].string_value = old.parameters[name].string_value
        assert new == old
        assert (tmp_path / "copy" / model / "1/model.py").is_file()


# The command.


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--backend", "triton", *arguments])
    assert result.exit_code == 2
    return re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api-keys", "keys.txt"), "--api-keys is no option of --backend triton"),
        (("--request-timeout", "5"), "--request-timeout is no option of --backend triton"),
        (("--checkpoint", "a", "--checkpoint", "b"), "--checkpoint is given 2 times"),
        (("--checkpoint", "nowhere"), "no checkpoint at nowhere"),
        (("--kernels", "fast"), "kernels is 'fast'; it must be one of auto, native, portable"),
        (("--seq-length", "4096"), "seq_length is 4096; this model's max_sequence_length is 2048"),
        (("--session-dir", "/dev/null"), "session_dir is '/dev/null', but sessions cannot be kept"),
        (("--cache-memory", "1KiB"), "cache_memory is '1KiB'"),
        (("--port", "65535"), "port is 65535; Triton takes the next two"),
        (("--host", "::1"), "host is '::1'; it must be an IPv4 address or a name of one"),
    ],
)
def test_an_option_that_cannot_be_is_named(arguments: tuple[str, ...], message: str) -> None:
    pytest.importorskip("pytriton", reason="needs pip install 'glm-multiuser[triton]'")
    assert message in refused(*arguments)


def test_a_host_name_is_resolved_for_tritonserver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytriton", reason="needs pip install 'glm-multiuser[triton]'")
    hosts = []
    monkeypatch.setattr(triton_run, "serve", lambda parameters, host, ports: hosts.append(host))
    monkeypatch.setattr(logs, "configure_logging", lambda as_json: None)
    command = ["serve", "--backend", "triton", "--host", "localhost", "--port", "0"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert hosts == ["127.0.0.1"]


def test_another_backend_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--backend", "nonsense"])
    assert result.exit_code == 2
    assert "it must be 'fastapi' or 'triton'" in result.output


def test_without_the_wheel_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'glm-multiuser[triton]'" in refused()


# Recovery, with a server that only says what it was asked.


class FakeServer:
    """A model whose process has died; loading it gives it a new one.

    Args:
        state: of the model in the repository's index.
        failures: loads that fail first.
    """

    def __init__(self, stop: threading.Event, state: str = "READY", failures: int = 0) -> None:
        self.calls: list[str] = []
        self.process: Optional[int] = None
        self.answer: Any = True
        self._stop = stop
        self._state = state
        self._failures = failures
        self._looks = 0

    def stub(self, model: str) -> Optional[int]:
        return self.process

    def state(self, model: str) -> str:
        # A dead process is replaced first, however late the thread that sees it comes.
        self._looks += self.process is not None or self._state != "READY"
        if self._looks > 20:
            self._stop.set()
        return self._state

    def answers(self, model: str, seconds: float) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return bool(self.answer)

    def unload(self, model: str) -> None:
        self.calls.append("unload")

    def load(self, model: str) -> None:
        self.calls.append("load")
        self._failures -= 1
        if self._failures >= 0:
            raise ConfigError("not yet")
        self.process = 2
        self.answer = True


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Lets a supervisor watch a fake server until it has looked 20 times."""
    for name in ("CHECK_SECONDS", "PROBE_SECONDS", "RETRY_SECONDS", "UNLOAD_SECONDS"):
        monkeypatch.setattr(triton_supervisor, name, 0.001)
    stop = threading.Event()

    def watch(process: Optional[int] = None, answer: Any = True, **settings: Any) -> list[str]:
        server: Any = FakeServer(stop, **settings)
        server.process, server.answer = process, answer
        Supervisor(server, server, "chatglm", tmp_path / "config.pbtxt").watch(stop)
        return list(server.calls)

    return watch


def test_a_dead_process_is_replaced(watched: Any) -> None:
    assert watched() == ["unload", "load"]


def test_a_failed_recovery_is_tried_again(watched: Any) -> None:
    assert watched(failures=2) == ["unload", "load"] * 3


@pytest.mark.parametrize("answer", [False, OSError("timed out")], ids=["error", "no answer"])
def test_a_model_that_does_not_answer_is_replaced(watched: Any, answer: Any) -> None:
    assert watched(process=1, answer=answer) == ["unload", "load"]


@pytest.mark.parametrize("state", ["LOADING", "UNLOADING", "UNAVAILABLE", ""])
def test_a_model_that_was_unloaded_is_left_alone(watched: Any, state: str) -> None:
    assert watched(state=state) == []


def test_a_model_that_answers_is_left_alone(watched: Any) -> None:
    assert watched(process=1) == []
