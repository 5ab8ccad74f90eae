"""Sessions over HTTP: private to one key, listed and deleted by it, restored after a restart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm_multiuser.server.keys import Caller
from glm_multiuser.server.settings import ServerSettings
from tests.server.echoing import echo_llm, message
from tests.server.in_process import InProcessServer, in_process_server, mock_settings, wait_until

KEYS = {"red": "red-key-0123456789", "blue": "blue-key-0123456789"}

served = partial(in_process_server, open_llm=echo_llm)


def settings_of(users: int = 1, keys: Any = KEYS, **settings: Any) -> ServerSettings:
    given = mock_settings(users=users, max_queue=64, keys=keys)
    models = [replace(one, engine=replace(one.engine, **settings)) for one in given.models]
    return replace(given, models=tuple(models))


class Client:
    """Whoever has a key."""

    def __init__(self, server: InProcessServer, key: str) -> None:
        self.url = server.url
        self.headers = {"Authorization": f"Bearer {KEYS[key]}"}

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        with httpx.Client(headers=self.headers, timeout=120, trust_env=False, verify=False) as http:
            return http.request(method, f"{self.url}{path}", json=body)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path).raise_for_status()

    def cached(self, session: str, *texts: str) -> int:
        """Asks with every text but the last as history -> cached tokens."""
        messages = []
        for text in texts[:-1]:
            messages += [
                {"role": "user", "content": message(text)},
                {"role": "assistant", "content": text},
            ]
        messages.append({"role": "user", "content": message(texts[-1])})
        asked = {"messages": messages, "user": session}
        answer = self.request("POST", "/v1/chat/completions", asked)
        body = answer.raise_for_status().json()
        assert body["choices"][0]["message"]["content"] == texts[-1]
        held: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return held

    def sessions(self) -> list[tuple[str, str]]:
        body = self.get("/v1/sessions").json()
        return sorted((one["id"], one["place"]) for one in body["data"])

    def delete(self, session: str) -> Any:
        return self.request("DELETE", f"/v1/sessions/{session}").raise_for_status().json()


def test_two_keys_use_the_same_session_names(tmp_path: Path) -> None:
    with served(settings_of(session_memory="1MiB", session_dir=str(tmp_path))) as server:
        red, blue = Client(server, "red"), Client(server, "blue")
        for name in ("anna", "bela"):
            assert red.cached(name, "hello") == 0
            assert blue.cached(name, "hello") == 0
        for name in ("anna", "bela"):
            assert red.cached(name, "hello", "again") > 0
            assert blue.cached(name, "hello", "again") > 0
        assert {name for name, _ in red.sessions()} == {"anna", "bela"}
        assert red.delete("anna") == {
            "id": "anna",
            "object": "session.deleted",
            "deleted": True,
        }
        assert {name for name, _ in red.sessions()} == {"bela"}
        assert {name for name, _ in blue.sessions()} == {"anna", "bela"}
        assert red.cached("anna", "hello", "again") == 0
        assert blue.cached("anna", "hello", "again", "more") > 0
        # A name with a slash is one, and reaches no other key.
        red.delete("blue/anna")
        assert {name for name, _ in blue.sessions()} == {"anna", "bela"}


def test_a_restart_keeps_a_session_and_a_new_key_does_not_get_it(tmp_path: Path) -> None:
    settings = settings_of(session_dir=str(tmp_path))
    with served(settings) as server:
        Client(server, "red").cached("anna", "hello")
    with served(settings) as server:
        red = Client(server, "red")
        body = red.get("/v1/sessions").json()
        assert [(one["id"], one["place"]) for one in body["data"]] == [(None, "disk")]
        assert Client(server, "blue").sessions() == []
        assert Client(server, "blue").cached("anna", "hello", "again") == 0
        assert red.cached("anna", "hello", "again") > 0
    # The name of the key is the same, but another key has it now.
    with served(replace(settings, keys={"red": KEYS["blue"]})) as server:
        assert Client(server, "blue").cached("anna", "hello", "again") == 0


def test_a_session_of_an_unloaded_model_is_not_called_deleted(tmp_path: Path) -> None:
    settings = replace(settings_of(session_dir=str(tmp_path)), model_control="all")
    with served(settings) as server:
        red = Client(server, "red")
        red.cached("s", "one")
        name = red.get("/v1/models").json()["data"][0]["id"]
        red.request("POST", f"/v2/repository/models/{name}/unload").raise_for_status()
        assert len(list(tmp_path.glob("*.session"))) == 1
        for method, path in (("DELETE", "/v1/sessions/s"), ("GET", "/v1/sessions")):
            answer = red.request(method, path)
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
            assert "unloaded" in answer.json()["error"]["message"]
        red.request("POST", f"/v2/repository/models/{name}/load").raise_for_status()
        assert red.request("DELETE", "/v1/sessions/s").json()["deleted"] is True
        assert not list(tmp_path.glob("*.session"))


def test_a_file_that_cannot_be_removed(tmp_path: Path) -> None:
    """The client learns it, and the sessions of other models are deleted."""
    given = mock_settings(users=1, max_queue=64, names=("first", "second"), keys=KEYS)
    folders = [tmp_path / model.name for model in given.models]
    models = [
        replace(model, engine=replace(model.engine, session_dir=str(folder)))
        for model, folder in zip(given.models, folders)
    ]
    with served(replace(given, models=tuple(models))) as server:
        red = Client(server, "red")
        for model in models:
            asked = {"model": model.name, "messages": [{"role": "user", "content": "x"}]}
            red.request("POST", "/v1/chat/completions", {**asked, "user": "anna"})
        wait_until(lambda: all(list(folder.glob("*.session")) for folder in folders))
        (file,) = folders[0].glob("*.session")
        file.unlink()
        file.mkdir()  # cannot be removed as a file
        answer = red.request("DELETE", "/v1/sessions/anna")
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "session_not_deleted"
        assert "session 'anna' is not deleted" in error["message"]
        assert str(tmp_path) not in error["message"]
        assert not list(folders[1].glob("*.session"))
        file.rmdir()
        assert red.delete("anna")["deleted"] is True


def test_status_and_metrics_count_sessions(tmp_path: Path) -> None:
    with served(settings_of(session_memory="1MiB", session_dir=str(tmp_path))) as server:
        red = Client(server, "red")
        for name in ("anna", "bela"):
            red.cached(name, "hello")
        red.cached("anna", "hello", "again")
        wait_until(lambda: red.get("/status").json()["sessions"]["on_disk"] == 2)
        status = red.get("/status").json()["sessions"]
        assert status["restored"] == 1
        assert status["restored_tokens"] > 0
        assert status["disk_bytes"] > status["memory_bytes"] > 0
        metrics = red.get("/metrics").text
        assert 'glm_sessions_restored_total{model="mock"} 1.0' in metrics
        assert 'glm_sessions_on_disk{model="mock"} 2.0' in metrics


@pytest.mark.parametrize("name", ["x" * 257, "%00", ""])
def test_a_name_that_is_none(name: str) -> None:
    with served(settings_of()) as server:
        answer = Client(server, "red").request("DELETE", f"/v1/sessions/{name}")
        assert answer.status_code == 400


def test_a_caller_does_not_show_its_owner() -> None:
    assert "secret" not in repr(Caller("red", owner=b"secret"))


@pytest.mark.rare
def test_three_hundred_sessions_of_two_keys(tmp_path: Path) -> None:
    """150 names, which both keys use; a key's question never starts behind the other's tokens."""
    names = [f"session {number}" for number in range(150)]
    held = []
    with served(settings_of(users=8, session_dir=str(tmp_path))) as server:
        red, blue = Client(server, "red"), Client(server, "blue")
        for name in names:
            assert red.cached(name, "a question of theirs") == 0
            assert blue.cached(name, "a question of theirs") == 0
        for turn in range(2):
            texts = ["a question of theirs", "a second one", "a third one"][: turn + 2]
            for name in names:
                held += [one.cached(name, *texts) > 0 for one in (red, blue)]
    assert sum(held) >= 0.95 * len(held)
