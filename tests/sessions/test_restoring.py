"""What happens to a session while it is copied into its slot, one token in a step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest

from glm_multiuser.engine import slot_sessions
from glm_multiuser.errors import InvalidParameterError, UserBusyError
from glm_multiuser.sessions.folder import SessionFolder
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.session import Session
from glm_multiuser.sessions.store import SessionStore
from tests.engine.driving import PATIENCE, Asked, alone, finish, hand_engine, run, wait_until
from tests.engine.mock_runner import Call, written
from tests.sessions.talking import causal_llm

LENGTH = 30
HELD = tuple(range(1, LENGTH + 1))
PROMPT = [*HELD, 5]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_sessions, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(slot_sessions, "SHARE", 0.0)


def store_with_session(user: str) -> SessionStore:
    """One that keeps nothing but what was inserted."""
    store = SessionStore()
    pieces = [written([token]).view(np.uint8) for token in HELD]
    store.insert(store.identity(b"", user), Session(HELD, pieces))
    return store


def test_a_resize_that_cannot_save_lets_it_be_restored() -> None:
    broken: list[Call] = []

    def no_memory(call: Call) -> None:
        if call.kind == "save" and not broken:
            broken.append(call)
            raise MemoryError("no memory for a copy")

    engine, _ = hand_engine(2, no_memory, chunk=8, store=store_with_session("bob"))
    asked = [Asked(PROMPT, "bob", **GREEDY), Asked([1, 2, 3], "alice", **GREEDY)]
    for one in asked:
        engine.submit(one.request)
    for _ in range(3):
        engine.step()
    with pytest.raises(MemoryError, match="no memory for a copy"):
        engine.resize(3, lambda *args: None)
    finish(engine)
    assert asked[0].request.cached_tokens == LENGTH
    for one in asked:
        assert one.wait().token_ids == alone(one.request.prompt_token_ids, **GREEDY).token_ids


@pytest.mark.parametrize("resized", [False, True])
def test_a_request_that_is_cancelled_meanwhile_leaves_it_to_the_next(resized: bool) -> None:
    engine, _ = hand_engine(2, chunk=8, store=store_with_session("bob"))
    first, second = (Asked(PROMPT, "bob", **GREEDY) for _ in range(2))
    engine.submit(first.request)
    for _ in range(3):
        engine.step()
    if resized:
        engine.resize(3, lambda *args: None)
    engine.cancel(first.request)
    finish(engine)
    assert first.wait().reason == "cancelled"
    run(engine, second)
    assert second.request.cached_tokens == LENGTH
    assert second.token_ids == alone(PROMPT, **GREEDY).token_ids
    assert engine.store.counts().in_memory == 0, "it lives in the slot now"


def test_a_prompt_that_has_nothing_in_common_with_it_drops_it() -> None:
    engine, _ = hand_engine(2, chunk=8, store=store_with_session("bob"))
    run(engine, Asked([7], "bob", **GREEDY))
    assert engine.store.counts().in_memory == 0


class SlowFolder(SessionFolder):
    """A disk that reads nothing until it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 1 << 20, 3600.0, "5" * 32)
        self.go = threading.Event()

    def load(self, identity: Identity) -> Optional[Session]:
        assert self.go.wait(PATIENCE), "nobody let it read"
        return super().load(identity)


@pytest.mark.parametrize("later", [{}, {"cache_prompt": False}, {"prompt_logprobs": 0}])
def test_a_later_request_of_the_user_waits_while_it_is_read(
    tmp_path: Path, later: dict[str, Any]
) -> None:
    folder = SlowFolder(tmp_path)
    engine, runner = hand_engine(2, chunk=8, store=SessionStore(folder=folder))
    asked = [
        Asked([1], "bob", **GREEDY),
        Asked([2], "bob", **GREEDY, **later),
        Asked([3], cache_prompt=False, **GREEDY),
    ]
    for one in asked:
        engine.submit(one.request)
    finish(engine)
    assert asked[2].wait().reason == "length", "others pass"
    folder.go.set()
    wait_until(lambda: engine.step() or engine.numbers()[2] == 0)
    finish(engine)
    entered = list(dict.fromkeys(runner.requests_of("prefill")))
    assert entered == [asked[2].request, asked[0].request, asked[1].request]
    engine.store.close()


def test_a_paused_request_waits_for_no_file(tmp_path: Path) -> None:
    """Its caches are saved; what was read for it as well would never be taken."""
    folder = SlowFolder(tmp_path)
    engine, _ = hand_engine(2, chunk=8, store=SessionStore(folder=folder))
    asked = [Asked([number], f"user {number}", **GREEDY) for number in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    folder.go.set()
    wait_until(lambda: engine.step() and engine.numbers()[0] == 2)
    folder.go.clear()
    engine.resize(3, lambda *args: None)
    finish(engine)
    folder.go.set()
    for one in asked:
        assert one.look().end is not None
        assert one.token_ids == alone(one.request.prompt_token_ids, **GREEDY).token_ids
    engine.store.close()


def test_a_user_whose_request_is_paused_is_busy() -> None:
    engine, _ = hand_engine(2, chunk=8)
    asked = [Asked([number], number, **GREEDY) for number in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    engine.step()
    engine.step()
    engine.resize(1, lambda *args: None)
    engine.step()
    assert engine.numbers() == (1, 0, 1)
    for name in (1, 2):
        with pytest.raises(UserBusyError, match=f"user {name} has a request running"):
            engine.export(name)
        with pytest.raises(UserBusyError, match=f"user {name} has a request running"):
            engine.forget(name, only_idle=True)
    finish(engine)
    for name in (1, 2):
        engine.forget(name, only_idle=True)


def test_a_user_whose_request_is_cancelled_is_not_busy() -> None:
    engine, _ = hand_engine(1, chunk=8)
    asked = Asked([1, 2], "a", **GREEDY)
    engine.submit(asked.request)
    engine.step()
    engine.cancel(asked.request)  # as a handle does at a stop string
    engine.forget("a", only_idle=True)
    assert asked.wait().reason == "cancelled"
    assert engine.export("a") is None


def test_a_resize_saves_the_session_of_a_cancelled_request() -> None:
    engine, _ = hand_engine(1, chunk=8, store=SessionStore(memory=1 << 20))
    asked = Asked([1, 2], "a", **GREEDY)
    engine.submit(asked.request)
    engine.step()
    engine.cancel(asked.request)  # as a handle does at a stop string
    engine.resize(1, lambda *args: None)
    assert [(one.user, one.place) for one in engine.session_infos(b"")] == [("a", "memory")]
    assert asked.wait().reason == "cancelled"


def test_a_session_has_its_users_name_again_after_forget() -> None:
    engine, _ = hand_engine(1, chunk=8, store=SessionStore(memory=1 << 20))
    running, waiting = Asked([1, 2], "bob", **GREEDY), Asked([1, 2, 3], "bob", **GREEDY)
    engine.submit(running.request)
    engine.step()
    engine.submit(waiting.request)
    engine.forget("bob")
    engine.store.forget(engine.store.identity(b"", "bob"))
    run(engine, Asked([5], "alice", **GREEDY))
    assert [(one.user, one.place) for one in engine.session_infos(b"")] == [
        ("alice", "slot"),
        ("bob", "memory"),
    ]


def test_nobody_has_no_session(tmp_path: Path) -> None:
    nobody: Any = None
    with causal_llm(2) as llm:
        asks: list[Callable[[], None]] = [
            lambda: llm.save_session(nobody, tmp_path / "file"),
            lambda: llm.load_session(nobody, tmp_path / "file"),
            lambda: llm.forget(nobody),
        ]
        for ask in asks:
            with pytest.raises(InvalidParameterError, match="user is None; it must be an int or a"):
                ask()
