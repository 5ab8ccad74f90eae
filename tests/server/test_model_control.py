"""Permissions for loading and unloading models; a failed load changes nothing; with mocks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Optional

import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.server import loading
from glm_multiuser.server.settings import ModelSettings
from tests.server.asking import BLUE, KEYS, RED, answer_alone, ask, get, post
from tests.server.in_process import (
    MODEL,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
)

REPOSITORY = f"/v2/repository/models/{MODEL}"
ADMIN = frozenset({"red"})


def load(server: InProcessServer, **parameters: int) -> Any:
    config = json.dumps({"parameters": parameters})
    return post(server, f"{REPOSITORY}/load", {"parameters": {"config": config}})


@pytest.mark.parametrize(
    ("address", "keys", "expected"),
    [
        ("127.0.0.1", {}, "all"),
        ("::1", {}, "all"),
        ("0.0.0.0", {}, "none"),
        ("::", {}, "none"),
        ("192.168.0.7", {}, "none"),
        ("127.0.0.1", KEYS, "none"),
        ("0.0.0.0", KEYS, "none"),
    ],
)
def test_the_default_depends_on_address_and_keys(
    address: str, keys: dict[str, str], expected: str
) -> None:
    settings = mock_settings(keys=keys)
    assert settings.at(address).model_control == expected
    for given in ("none", "all"):
        assert replace(settings, model_control=given).at(address).model_control == given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "key", "refusal"),
    [
        (None, RED, "--model-control is 'none': loading and unloading models is disabled"),
        ("none", RED, "--model-control is 'none': loading and unloading models is disabled"),
        (
            "keys",
            BLUE,
            "--model-control is 'keys': loading and unloading models needs an API key with",
        ),
        ("keys", RED, ""),
        ("all", BLUE, ""),
    ],
)
def test_who_may_load_and_unload(control: Optional[str], key: dict[str, str], refusal: str) -> None:
    settings = mock_settings(keys=KEYS, admins=ADMIN, model_control=control)
    with in_process_server(settings) as server:
        engine = server.llm()
        for path, body in (
            ("unload", {}),
            ("load", {}),
            ("load", {"parameters": {"config": "{}"}}),
        ):
            response = post(server, f"{REPOSITORY}/{path}", body, **key)
            assert response.status_code == (403 if refusal else 200)
            assert refusal in response.json().get("error", "")
        assert post(server, "/v2/repository/index", {}, **key).status_code == 200
        assert (server.llm() is engine) == bool(refusal)


def test_a_role_that_no_key_has_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="model_control is 'keys'; of the API keys none has"):
        mock_settings(keys=KEYS, model_control="keys")


def test_a_load_for_which_there_is_no_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_process_server(mock_settings(users=2)) as server:
        engine = server.llm()
        model = server.service.models.get(MODEL).settings
        more = replace(model, engine=replace(model.engine, users=1024))
        # The model that is there is closed first, so what it takes is available, too.
        rest = loading.memory_bytes(more) - loading.memory_bytes(model)
        monkeypatch.setattr(loading, "available_bytes", lambda: rest - 1)
        response = load(server, users=1024)
        needed, there = (one / 2**20 for one in (loading.memory_bytes(more), rest - 1))
        there += loading.memory_bytes(model) / 2**20
        assert (response.status_code, response.json()["code"]) == (400, "load_failed")
        assert response.json()["error"] == (
            f"failed to load {MODEL!r}: model {MODEL!r} needs {needed:.1f} MiB for its weights "
            f"and caches, with users 1024 and seq_length {model.engine.seq_length}; "
            f"{there:.1f} MiB are available"
        )
        assert server.llm() is engine
        assert server.service.models.get(MODEL).settings == model
        assert ask(server, "ab").json()["response"] == answer_alone("ab")
        monkeypatch.setattr(loading, "available_bytes", lambda: rest)
        assert load(server, users=1024).status_code == 200


@pytest.mark.parametrize("device", ["CPU", "Ascend"])
def test_where_available_memory_is_unknown_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Memory of the host is not that of a card."""
    there = 0 if device == "Ascend" else None
    monkeypatch.setattr(loading, "available_bytes", lambda: there)
    settings = mock_settings()
    (model,) = settings.models
    model = replace(model, engine=replace(model.engine, device_target=device))
    loading.check(model, (), settings)


class Device:
    """Opens mocks, but none with so many users as in `fails`."""

    def __init__(self) -> None:
        self.fails: set[int] = set()

    def open_llm(self, settings: ModelSettings, **options: Any) -> MultiUserLLM:
        if settings.engine.users in self.fails:
            raise CheckpointError(f"{settings.engine.users} users do not work")
        return mock_llm(settings, **options)


def test_after_a_load_that_failed_the_model_is_back_as_it_was() -> None:
    device = Device()
    with in_process_server(mock_settings(users=2), device.open_llm) as server:
        before = server.service.models.get(MODEL).settings
        device.fails = {3}
        response = load(server, users=3)
        assert response.status_code == 400
        assert response.json()["error"] == f"failed to load {MODEL!r}: 3 users do not work"
        assert server.service.models.get(MODEL).settings == before
        assert server.llm().stats().users == 2
        assert ask(server, "ab").json()["response"] == answer_alone("ab")
        assert get(server, "/v2/health/ready").status_code == 200
        device.fails = set()
        assert load(server, users=3).status_code == 200
        assert server.llm().stats().users == 3


def test_a_first_load_that_failed_is_forgotten() -> None:
    device = Device()
    with in_process_server(mock_settings(users=2), device.open_llm) as server:
        assert post(server, f"{REPOSITORY}/unload", {}).status_code == 200
        device.fails = {3}
        assert load(server, users=3).status_code == 400
        assert get(server, "/v2/health/live").status_code == 200
        assert server.service.models.get(MODEL).engine is None
        assert post(server, f"{REPOSITORY}/load", {}).status_code == 200
        assert server.llm().stats().users == 2


def test_a_model_that_does_not_come_back_is_lost() -> None:
    device = Device()
    with in_process_server(mock_settings(users=2), device.open_llm) as server:
        device.fails = {2, 3}
        assert load(server, users=3).status_code == 400
        assert get(server, "/v2/health/live").status_code == 503
        assert get(server, "/v2/health/ready").json()["state"] == "failed"
        device.fails = set()
        assert post(server, f"{REPOSITORY}/load", {}).status_code == 200
        assert server.llm().stats().users == 2
        assert get(server, "/v2/health/live").status_code == 200


def test_a_server_without_a_model_that_answers_is_not_ready() -> None:
    with in_process_server(mock_settings(names=(MODEL, "other"))) as server:
        for name in ("other", MODEL):
            assert get(server, "/v2/health/ready").json()["state"] == "ready"
            assert post(server, f"/v2/repository/models/{name}/unload", {}).status_code == 200
        response = get(server, "/v2/health/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "state": "unloaded", "loading": []}
        assert get(server, "/v2/health/live").status_code == 200
        assert post(server, f"{REPOSITORY}/load", {}).status_code == 200
        assert get(server, "/v2/health/ready").status_code == 200
