"""Commands with the name of a model, and what they check before they download it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.loading import with_local_paths
from glm_multiuser.server.settings import ServerSettings, model_settings
from tests.checkpoint.hub_server import Hub, only_hub
from tests.cli.fake import FakeLLM

NAME = "some-owner/glm-tiny"
FILES = {
    *("config.json", "generation_config.json", "ice_text.model", "tokenizer_config.json"),
    "model.safetensors",
}


@pytest.fixture(scope="module")
def only() -> Iterator[Hub]:
    with tempfile.TemporaryDirectory() as folder, only_hub(Path(folder, "cache")) as hub:
        yield hub


@pytest.fixture
def hub(only: Hub, glm_tiny: Path) -> Hub:
    only.clear()
    only.add(NAME, glm_tiny)
    return only


@pytest.mark.parametrize("command", ["demo --users 1", "generate -"])
def test_a_model_by_name(
    run: Callable[..., Any], fake_llm: type[FakeLLM], hub: Hub, command: str
) -> None:
    result = run(*command.split(), "--checkpoint", NAME, stdin="who?\n")
    assert f"downloading what the cache does not have of {NAME} ..." in result.stderr
    folder = Path(fake_llm.opened[-1].settings["folder"])
    assert {path.name for path in folder.iterdir()} == hub.transferred() == FILES
    assert folder.is_relative_to(hub.cache)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --users 0", "users is 0"),
        ("serve --max-body 0", "--max-body is 0"),
        ("serve --cors-origin x", "--cors-origin has 'x'"),
        ("serve --tls-cert /nowhere --tls-key /nowhere", "tls_cert"),
        ("serve --api-keys /nowhere", "/nowhere"),
        ("serve --replicas 2 --root-path /x", "--root-path is /x"),
        ("bench --users 1,1025", "users is 1025"),
        ("bench --prompt-tokens 2", "prompt-tokens is 2"),
        ("demo --users 0", "users is 0"),
        ("chat --temperature -1", "temperature is -1"),
        ("selfcheck --kernels fast", "kernels is 'fast'"),
    ],
)
def test_options_are_checked_before_anything_is_downloaded(
    run: Callable[..., Any], fake_llm: type[FakeLLM], hub: Hub, command: str, message: str
) -> None:
    result = run(*command.split(), "--checkpoint", NAME)
    assert result.exit_code == 2
    assert message in result.stderr
    assert hub.requests == []


@pytest.mark.parametrize("command", ["serve", "bench --no-plot", "demo", "chat"])
def test_what_the_model_limits_is_checked_before_its_weights_are_downloaded(
    run: Callable[..., Any], fake_llm: type[FakeLLM], hub: Hub, command: str
) -> None:
    result = run(*command.split(), "--seq-length", 4096, "--checkpoint", NAME)
    assert result.exit_code == 2
    assert "seq_length is 4096; this model's max_sequence_length is 2048" in result.stderr
    assert hub.transferred() == FILES - {"model.safetensors"}


def test_a_plan_needs_no_weights(run: Callable[..., Any], hub: Hub, tmp_path: Path) -> None:
    plans = []
    for model in (NAME, "ckpt/glm-tiny"):
        result = run("plan", "--model", model, "--json", tmp_path / "plan.json")
        assert result.exit_code == 0, result.output
        plans.append(json.loads((tmp_path / "plan.json").read_text("utf-8")))
    assert [plan.pop("model") for plan in plans] == [NAME, "ckpt/glm-tiny"]
    assert plans[0] == plans[1]
    assert hub.transferred() == FILES - {"model.safetensors"}


@pytest.mark.parametrize("command", ["demo --checkpoint", "serve --checkpoint", "plan --model"])
def test_no_such_model_is_one_line(
    run: Callable[..., Any], fake_llm: type[FakeLLM], hub: Hub, command: str
) -> None:
    result = run(*command.split(), "some-owner/nothing")
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith(
        "error: model 'some-owner/nothing' is no path, and cannot be downloaded"
    )
    assert "there is no such model" in error
    assert fake_llm.opened == []


def test_replicas_of_ray_download_too(hub: Hub, tmp_path: Path) -> None:
    places = [NAME, f"local={tmp_path}"]
    settings = ServerSettings(tuple(model_settings(places, EngineConfig(), load=True)))
    remote, local = with_local_paths(settings).models
    assert (remote.name, local.name) == ("glm-tiny", "local")
    assert (remote.folder / "model.safetensors").is_file()
    assert local.folder == tmp_path
    tight = ServerSettings(tuple(model_settings([NAME], EngineConfig(seq_length=4096), load=True)))
    with pytest.raises(ConfigError, match="seq_length is 4096"):
        with_local_paths(tight)
