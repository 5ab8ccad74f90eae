"""Loading and unloading over KServe v2; models are mocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser.errors import CheckpointError
from tests.engine.stepping import SingleSteps
from tests.server.asking import answer_alone, get, in_background, long_prompts, post
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)
from tests.server.kserve_asking import PATH, HeldOpening, generate, states

REPOSITORY = f"/v2/repository/models/{MODEL}"


@pytest.fixture
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(names=(MODEL, "other"))) as server:
        yield server


@pytest.fixture(scope="module")
def steady() -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    with in_process_server(mock_settings(names=(MODEL, "other"))) as server:
        yield server


def load(server: InProcessServer, config: Any) -> Any:
    text = config if isinstance(config, str) else json.dumps(config)
    return post(server, f"{REPOSITORY}/load", {"parameters": {"config": text}})


def test_unloading_lets_running_requests_end(server: InProcessServer) -> None:
    prompt = long_prompts(1)[0]
    with SingleSteps():
        running = in_background(generate, server, prompt)
        wait_until(lambda: server.service.running == 1)
        unloading = in_background(post, server, f"{REPOSITORY}/unload", {})
        wait_until(lambda: states(server)[MODEL] == "UNLOADING")
        assert generate(server).status_code == 503
        assert not unloading.done()
    assert running.result(PATIENCE).json()["response"] == answer_alone(prompt)
    assert unloading.result(PATIENCE).json() == {}
    assert states(server) == {MODEL: "UNAVAILABLE", "other": "READY"}
    assert states(server, ready=True) == {"other": "READY"}


def test_an_unloaded_model_is_known_but_does_nothing(server: InProcessServer) -> None:
    post(server, f"{REPOSITORY}/unload", {"parameters": {"unload_dependents": True}})
    assert get(server, PATH).json()["name"] == MODEL
    assert get(server, f"{PATH}/config").json()["name"] == MODEL
    body = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["q"]}]}
    for reply in (
        get(server, f"{PATH}/stats"),
        generate(server),
        post(server, f"{PATH}/infer", body),
    ):
        assert reply.status_code == 503
        assert reply.json()["code"] == "model_not_ready"
    names = [one["name"] for one in get(server, "/v2/models/stats").json()["model_stats"]]
    assert names == ["other"]
    assert post(server, f"{REPOSITORY}/unload", {}).status_code == 200
    assert post(server, f"{REPOSITORY}/load", {}).json() == {}
    assert generate(server).json()["response"] == answer_alone("hello")


def test_loading_returns_when_the_model_is_ready() -> None:
    opening = HeldOpening()
    opening.go.set()
    with in_process_server(open_llm=opening) as server:
        post(server, f"{REPOSITORY}/unload", {})
        opening.go.clear()
        opening.arrived.clear()
        loading = in_background(post, server, f"{REPOSITORY}/load", {})
        assert opening.arrived.wait(PATIENCE)
        assert states(server) == {MODEL: "LOADING"}
        assert not loading.done()
        opening.go.set()
        assert loading.result(PATIENCE).status_code == 200
        assert get(server, f"{PATH}/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("value", [33, "33", {"string_value": "33"}, {"string_value": 33}])
def test_a_configuration_changes_a_model(server: InProcessServer, value: Any) -> None:
    assert load(server, {"parameters": {"users": value}}).status_code == 200
    assert server.llm().stats().users == 33
    assert generate(server).json()["response"] == answer_alone("hello")


def test_a_configuration_changes_everything_that_can_be_changed(server: InProcessServer) -> None:
    wanted = {"users": 3, "seq_length": 64, "max_queue": 0}
    assert load(server, {"parameters": wanted}).status_code == 200
    engine = server.service.models.get(MODEL).settings.engine
    assert {name: getattr(engine, name) for name in wanted} == wanted
    config = get(server, f"{PATH}/config").json()
    assert config["parameters"] == {
        name: {"string_value": str(value)} for name, value in wanted.items()
    }


def test_a_configuration_may_come_back_as_it_is(server: InProcessServer) -> None:
    engine = server.llm()
    config = get(server, f"{PATH}/config").json()
    assert load(server, config).status_code == 200
    assert server.llm() is engine
    config["parameters"]["users"]["string_value"] = "3"
    assert load(server, config).status_code == 200
    assert server.llm().stats().users == 3
    most = 3 + int(config["parameters"]["max_queue"]["string_value"])
    assert get(server, f"{PATH}/config").json() == {**config, "max_batch_size": most}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "config must be a JSON object"),
        ("[]", "config must be a JSON object"),
        ({"max_batch_size": 99}, "config.max_batch_size cannot be changed"),
        ({"nonsense": 1}, "config.nonsense cannot be changed"),
        ({"parameters": 5}, "config.parameters must be a JSON object"),
        ({"parameters": {"folder": "/"}}, "config.parameters.folder is unknown; there are users"),
        ({"parameters": {"users": "many"}}, "config.parameters.users is 'many'"),
        ({"parameters": {"users": {}}}, "config.parameters.users is None"),
        ({"parameters": {"users": 1.5}}, "config.parameters.users is 1.5"),
        ({"parameters": {"users": 0}}, "users is 0; it must be between 1 and 1024"),
        ({"parameters": {"users": "1025"}}, "users is 1025; it must be between 1 and 1024"),
        ({"parameters": {"seq_length": 7}}, "seq_length is 7; it must be between 8 and"),
        ({"parameters": {"max_queue": -1}}, "max_queue is -1; it must be between 0 and"),
    ],
)
def test_a_configuration_that_cannot_be_leaves_the_model_alone(
    steady: InProcessServer, config: Any, problem: str
) -> None:
    engine = steady.llm()
    reply = load(steady, config)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]
    assert steady.llm() is engine


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"parameters": {"file:1/model.py": "YQ=="}}, "parameters.file:1/model.py"),
        ({"parameters": {"config": {"parameters": {}}}}, "parameters.config"),
        ({"parameters": []}, "parameters"),
    ],
)
def test_a_load_of_other_things_is_refused(
    steady: InProcessServer, body: Any, problem: str
) -> None:
    reply = post(steady, f"{REPOSITORY}/load", body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_an_unknown_model_can_be_neither_loaded_nor_unloaded(
    steady: InProcessServer, verb: str
) -> None:
    reply = post(steady, f"/v2/repository/models/nobody/{verb}", {})
    assert reply.status_code == 400
    assert reply.json()["error"] == (
        f"failed to {verb} 'nobody': model 'nobody' is unknown; this server has {MODEL}, other"
    )


def test_a_load_that_fails_says_why() -> None:
    broken = False

    def open_llm(settings: Any, **options: Any) -> Any:
        if broken:
            raise CheckpointError("no weights")
        return mock_llm(settings, **options)

    with in_process_server(open_llm=open_llm) as server:
        post(server, f"{REPOSITORY}/unload", {})
        broken = True
        reply = post(server, f"{REPOSITORY}/load", {})
        assert reply.status_code == 400
        assert reply.json() == {
            "error": f"failed to load {MODEL!r}: no weights",
            "code": "load_failed",
        }
        assert states(server) == {MODEL: "UNAVAILABLE"}
        broken = False
        assert post(server, f"{REPOSITORY}/load", {}).status_code == 200
        assert generate(server).status_code == 200
