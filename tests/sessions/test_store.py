"""A store of sessions whose threads are held at certain moments."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.sessions.folder import SessionFolder
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.session import Session
from glm_multiuser.sessions.store import LOADS_MAX, SessionStore
from tests.engine.driving import PATIENCE

SESSION = Session([1, 2, 3], [np.arange(100, dtype=np.uint8)])


class HeldFolder(SessionFolder):
    """Removes a file only when `released` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 1 << 20, 1e9, "fingerprint")
        self.released = threading.Event()

    def forget(self, identity: Identity) -> None:
        assert self.released.wait(PATIENCE)
        super().forget(identity)


class Store(SessionStore):
    """One whose reads and writes can be waited for."""

    def __init__(self, folder: SessionFolder) -> None:
        super().__init__(folder=folder)
        self.changed = threading.Semaphore(0)
        self.on_change = self.changed.release

    def is_found(self, identity: Identity) -> bool:
        """Whether a new request of this user finds a session, once it was looked for."""
        if not self.ready(identity, lambda: False):
            assert self.changed.acquire(timeout=PATIENCE)
            assert self.ready(identity, lambda: False)
        return self.take(identity) is not None


def written(store: Store, user: str) -> Identity:
    identity = store.identity(b"", user)
    store.put(identity, SESSION)
    assert store.changed.acquire(timeout=PATIENCE)
    return identity


def test_what_is_being_removed_is_not_read(tmp_path: Path) -> None:
    folder = HeldFolder(tmp_path)
    store = Store(folder)
    one, other = written(store, "one"), written(store, "other")
    assert store.is_found(one)
    store.discard(one)
    forgetting = threading.Thread(target=store.forget, args=(other,))
    forgetting.start()
    assert not store.is_found(one)
    assert store.read(one) is None
    folder.released.set()
    forgetting.join(PATIENCE)
    assert not store.is_found(one)
    assert not store.is_found(other)
    assert store.is_found(written(store, "one"))
    store.close()


def test_requests_without_a_session_take_no_room(tmp_path: Path) -> None:
    store = Store(SessionFolder(tmp_path, 1 << 20, 1e9, "fingerprint"))
    waiting = [store.identity(b"", number) for number in range(2 * LOADS_MAX)]
    for identity in waiting:
        assert not store.ready(identity, lambda: False)
        assert store.changed.acquire(timeout=PATIENCE)
    assert all(store.ready(identity, lambda: False) for identity in waiting)
    store.close()


def test_an_expired_session_goes_although_it_was_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    store = SessionStore(memory=1 << 20, ttl=10)
    old, young = store.identity(b"", "old"), store.identity(b"", "young")
    store.put(old, SESSION)
    now = 5.0
    store.put(young, SESSION)
    assert store.read(old) is SESSION
    now = 11.0
    assert [one.user for one in store.list(b"")] == ["young"]
    store.close()
