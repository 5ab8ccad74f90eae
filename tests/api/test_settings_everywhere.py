"""Every way to set up an engine or a server takes every setting, and hands its value on."""

from __future__ import annotations

import inspect
import logging
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from typer.testing import CliRunner

from glm_multiuser import MultiUserLLM, config, llm
from glm_multiuser.cli import bench, bench_run
from glm_multiuser.cli import loading as cli_loading
from glm_multiuser.cli.commands import app
from glm_multiuser.server import loading, logs, run
from glm_multiuser.server.settings import Limits, ModelSettings, ServerSettings
from glm_multiuser.settings import Setting, pick, settings_of
from tests.cli.fake import FakeLLM

# Looked up late: the last test runs all others with a class that has one field more.
ENGINE = settings_of(config.EngineConfig)
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ckpt/glm-tiny"
"""Only its config.json is read."""


TEXTS = {
    "cache_memory": "8GiB",
    "weight_cache": str(ROOT / "packed"),
    "compile_cache_dir": str(ROOT / "compiled"),
    "session_memory": "2GiB",
    "session_dir": str(ROOT / "sessions"),
    "session_disk": "3GiB",
    "cors_origins": ("https://example.org",),
    "allowed_hosts": ("example.org",),
    "tls_cert": str(ROOT / "tests/server/tls/localhost.pem"),
    "tls_key": str(ROOT / "tests/server/tls/localhost.key"),
    "root_path": "/glm",
    "otlp_endpoint": "https://example.org",
    "forwarded_allow_ips": "10.0.0.0/8,127.0.0.1",
}


def another(one: Setting) -> Any:
    """A value that is allowed and is not the default."""
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.kind is bool:
        return not one.default
    if one.kind is str:
        return TEXTS[one.name]
    return (one.default or one.low or one.above or 0) + 1


VALUES = {one.name: another(one) for one in ENGINE}


def option_of(one: Setting) -> str:
    return one.option or f"--{one.name.replace('_', '-')}"


def words(settings: list[Setting], values: dict[str, Any]) -> list[str]:
    """The settings as options of a command."""
    found = []
    for one in settings:
        value = values.get(one.name)
        if one.kind is bool and value is not None:
            found.append(option_of(one) if value else option_of(one).replace("--", "--no-", 1))
        elif value is not None:
            found += [option_of(one), *map(str, value if isinstance(value, tuple) else [value])]
    return found


def run_command(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), input="who?\n", env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of every engine, which is not started."""
    configs: list[Any] = []
    monkeypatch.setattr(llm, "read_model_config", lambda *_: SimpleNamespace(vocab_size=100))
    for name in ("load_tokenizer", "load_weights"):
        monkeypatch.setattr(llm, name, lambda *_: None)
    monkeypatch.setattr(llm, "read_generation_defaults", lambda *_: {})
    monkeypatch.setattr(MultiUserLLM, "_start", lambda model, config, *_: configs.append(config))
    return configs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of every server, which is not started."""
    servers: list[ServerSettings] = []

    async def serve(settings: ServerSettings, listening: socket.socket, announce: object) -> None:
        servers.append(settings)
        listening.close()

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(logs, "configure_logging", lambda as_json: None)
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    monkeypatch.setattr(cli_loading, "check_engine", lambda *_: None)
    return servers


def test_python(started: list[Any]) -> None:
    MultiUserLLM.from_pretrained(FOLDER, **VALUES)
    MultiUserLLM.from_pretrained(FOLDER, *VALUES.values())
    MultiUserLLM.from_config(None, **VALUES)  # type: ignore[arg-type]
    assert started == [config.EngineConfig(**VALUES)] * 3


@pytest.mark.parametrize("way", [MultiUserLLM.from_pretrained, MultiUserLLM.from_config])
def test_python_help(way: Callable[..., Any]) -> None:
    parameters = inspect.signature(way).parameters
    text = inspect.getdoc(way) or ""
    for one in ENGINE:
        assert parameters[one.name].default == one.default
        assert f"{one.name}: {one.text}" in text


def test_server_loading(started: list[Any]) -> None:
    loading.open_llm(ModelSettings("one", FOLDER, config.EngineConfig(**VALUES)))
    assert started == [config.EngineConfig(**VALUES)]


@pytest.mark.parametrize("command", ["chat", "generate", "demo", "bench"])
def test_commands_that_open_an_engine(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "opened", [])
    monkeypatch.setattr(cli_loading, "llm_class", lambda: FakeLLM)
    monkeypatch.setattr(cli_loading, "check_engine", lambda *_: None)
    monkeypatch.setattr(bench, "run_in_child", bench_run.run)
    more = ["--no-plot", "--prompt-tokens", "8"] if command == "bench" else []
    run_command(command, "--checkpoint", str(FOLDER), *more, *words(ENGINE, VALUES))
    (opened,) = FakeLLM.opened
    assert pick(config.EngineConfig, opened.settings) == VALUES


def test_serve(served: list[ServerSettings]) -> None:
    limits = {one.name: another(one) for one in settings_of(Limits)}
    server = {one.name: another(one) for one in settings_of(ServerSettings)}
    run_command(
        "serve",
        *("--port", "0", "--checkpoint", f"one={FOLDER}", "--available", f"two={FOLDER}"),
        *words(ENGINE, VALUES),
        *words(settings_of(Limits), limits),
        *words(settings_of(ServerSettings), server),
    )
    (settings,) = served
    assert [model.engine for model in settings.models] == [config.EngineConfig(**VALUES)] * 2
    assert settings.limits == Limits(**limits)
    assert pick(ServerSettings, vars(settings)) == server


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tritonclient", reason="needs pip install 'glm-multiuser[triton]'")
    from glm_multiuser.deploy import triton_run, triton_server
    from glm_multiuser.deploy.triton_parameters import engine_arguments

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_server, "find_tritonserver", lambda: None)
    monkeypatch.setattr(logs, "configure_logging", lambda as_json: None)
    monkeypatch.setattr(triton_run, "serve", lambda parameters, *_: given.append(parameters))
    monkeypatch.setattr(cli_loading, "check_engine", lambda *_: None)
    place = ["--backend", "triton", "--checkpoint", str(FOLDER), "--port", "0"]
    run_command("serve", *place, *words(ENGINE, VALUES))
    (parameters,) = given
    texts = {name: {"string_value": str(value)} for name, value in parameters.items()}
    arguments = engine_arguments(texts, FOLDER)
    assert arguments.pop("folder") == FOLDER
    assert config.EngineConfig(**arguments) == config.EngineConfig(**VALUES)
    assert {*parameters} == {"checkpoint", *VALUES}


def test_ray() -> None:
    from glm_multiuser.deploy import ray_arguments

    engine = {name: VALUES[name] for name in {*VALUES} - {*ray_arguments.WITHOUT}}
    limits = {one.name: another(one) for one in settings_of(Limits)}
    server = {
        one.name: another(one)
        for one in settings_of(ServerSettings)
        if one.name not in ray_arguments.WITHOUT
    }
    scale = {one.name: another(one) for one in settings_of(ray_arguments.Scale)}
    settings, replicas = ray_arguments.read_arguments(
        {"checkpoint": f"one={FOLDER}", "limits": limits, **engine, **server, **scale}
    )
    assert settings.models[0].engine == config.EngineConfig(**engine)
    assert settings.limits == Limits(**limits)
    assert {name: getattr(settings, name) for name in server} == server
    assert replicas == ray_arguments.Scale(**scale)


@pytest.mark.parametrize("command", ["serve", "bench", "generate", "chat", "demo"])
def test_help_of_commands(command: str) -> None:
    text = run_command(command, "--help").stdout
    plain = " ".join(text.replace("│", " ").split())
    for one in ENGINE:
        assert f"{option_of(one)} " in text
        # `bench` takes several numbers of users.
        assert one.text in plain or (command, one.name) == ("bench", "users")


@pytest.mark.parametrize("command", ["plan", "selfcheck"])
def test_help_of_commands_that_choose_some_settings_themselves(command: str) -> None:
    from glm_multiuser.cli import plan, selfcheck

    without = {"plan": plan.WITHOUT, "selfcheck": selfcheck.CHOSEN}[command]
    text = run_command(command, "--help").stdout
    assert all(f"{option_of(one)} " in text for one in ENGINE if one.name not in without)


ADDED = """
import sys, pytest
from dataclasses import make_dataclass
from glm_multiuser import config
from glm_multiuser.settings import setting
field = ("gravity", int, setting(7, "How heavy", low=1, high=9))
config.EngineConfig = make_dataclass(
    "EngineConfig", [field], bases=(config.EngineConfig,), frozen=True
)
code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not new_field", *sys.argv[1:]])
from tests.api.test_settings_everywhere import VALUES
sys.exit(code or "gravity" not in VALUES)
"""


def test_a_new_field_is_everywhere() -> None:
    child = subprocess.run(
        [sys.executable, "-c", ADDED, __file__], capture_output=True, text=True, cwd=ROOT
    )
    assert child.returncode == 0, child.stdout + child.stderr
