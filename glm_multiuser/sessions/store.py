"""Sessions in memory and on disk, with separate threads for file I/O."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional

from glm_multiuser.errors import EngineClosedError
from glm_multiuser.sessions.folder import SessionFolder
from glm_multiuser.sessions.identity import SECRET_BYTES, Identity, identity_of, owner_of
from glm_multiuser.sessions.session import Session, SessionInfo
from glm_multiuser.worker_threads import run_on

logger = logging.getLogger(__name__)

LOADS_MAX = 4
"""Maximum sessions being read, or waiting for their request's slot."""
UNWRITTEN_BYTES = 256 << 20
"""Limit of unwritten sessions, if `session_memory` is less; a single one may exceed it."""
NAMES_MAX = 1 << 16
READERS = 2
COLLECT_SECONDS = 60.0
"""Between two searches for expired sessions, and for too many files of all servers."""


@dataclass
class SessionCounts:
    """Sessions kept now, and counters since the start."""

    in_memory: int = 0
    memory_bytes: int = 0
    on_disk: int = 0
    disk_bytes: int = 0
    saved: int = 0
    restored: int = 0
    restored_tokens: int = 0


@dataclass
class _Load:
    """A session that is being read, or was read, for a waiting request."""

    gone: Callable[[], bool]
    done: bool = False
    session: Optional[Session] = None

    @property
    def takes_room(self) -> bool:
        return not self.done or self.session is not None


class SessionStore:
    """The sessions of one engine. Thread-safe; only `forget`, `read`, `list` and `close` wait for
    the disk.

    Args:
        memory: maximum bytes of sessions in memory; 0: keeps none in memory.
        folder: on disk; None: keeps none on disk.
        ttl: seconds since its last use after which a session is dropped.

    Attributes:
        on_change: called after a session was read or written.
    """

    def __init__(
        self, memory: int = 0, folder: Optional[SessionFolder] = None, ttl: float = 1e9
    ) -> None:
        self.folder = folder
        self.on_change: Callable[[], None] = lambda: None
        self._secret = folder.secret if folder else os.urandom(SECRET_BYTES)
        self._memory, self._ttl = memory, ttl
        self._lock = threading.Lock()
        self._kept: OrderedDict[Identity, tuple[float, Session]] = OrderedDict()
        """With the time of the last use, in LRU order."""
        self._kept_bytes = 0
        self._unwritten: OrderedDict[Identity, Session] = OrderedDict()
        self._loads: dict[Identity, _Load] = {}
        self._inserted: dict[Identity, Session] = {}
        """From `insert`, until they are used; they count towards no limit."""
        self._removing: Counter[Identity] = Counter()
        """Those whose file is still to be removed: it is not read any more."""
        self._names: OrderedDict[str, Hashable] = OrderedDict()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="session-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="session-writer")
        self._saved = self._restored = self._restored_tokens = 0
        self._closed = threading.Event()
        if self.keeps:
            threading.Thread(target=self._collect, name="session-expiry", daemon=True).start()

    def identity(self, owner: bytes, user: Hashable) -> Identity:
        """Returns a user's identity, and remembers the user's name."""
        identity = identity_of(self._secret, owner, user)
        with self._lock:
            self._names[identity.name] = user
            self._names.move_to_end(identity.name)
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)
        return identity

    def owner(self, owner: bytes) -> str:
        """Returns the `owner` part of the identities of a tenant's users."""
        return owner_of(self._secret, owner)

    @property
    def keeps(self) -> bool:
        """Whether sessions are kept at all."""
        return self._memory > 0 or self.folder is not None

    @property
    def writes_behind(self) -> bool:
        """Whether a session is saved as soon as its user is idle."""
        return self.folder is not None

    def has_room(self, nbytes: int) -> bool:
        """Whether `put` would currently keep a session of this size."""
        if self.folder is None:
            return nbytes <= self._memory
        with self._lock:
            unwritten = sum(session.nbytes for session in self._unwritten.values())
        return not unwritten or unwritten + nbytes <= max(self._memory, UNWRITTEN_BYTES)

    def put(self, identity: Identity, session: Session) -> None:
        """Stores a session, replacing an earlier one."""
        with self._lock:
            self._inserted.pop(identity, None)
            self._drop(identity)
            if session.nbytes <= self._memory:
                self._kept[identity] = time.monotonic(), session
                self._kept_bytes += session.nbytes
            elif self.folder is None:
                return
            self._saved += 1
            self._make_room()
            if self.folder is None:
                return
            self._unwritten[identity] = session
        run_on(self._writer, partial(self._write, identity))

    def ready(self, identity: Identity, gone: Callable[[], bool]) -> bool:
        """Whether `take` can return without waiting for a read. If False, `on_change` follows.

        Args:
            identity: of the waiting request.
            gone: whether that request has ended without a slot.
        """
        with self._lock:
            if identity in self._inserted or self._in_memory(identity) is not None:
                return True
            load = self._loads.get(identity)
            if load is not None and not load.gone():
                return load.done
            if self.folder is None or self._removing[identity]:
                return True
            self._loads = {key: one for key, one in self._loads.items() if not one.gone()}
            if sum(one.takes_room for one in self._loads.values()) >= LOADS_MAX:
                return False
            self._loads[identity] = load = _Load(gone)
        run_on(self._readers, partial(self._read, self.folder, identity, load))
        return False

    def take(self, identity: Identity) -> Optional[Session]:
        """Returns the session in memory, or the one read; inserted ones stay until `restored`."""
        with self._lock:
            load = self._loads.pop(identity, None)
            found = self._inserted.get(identity) or self._in_memory(identity)
        return found or (load.session if load is not None else None)

    def insert(self, identity: Identity, session: Session) -> None:
        """Provides a session for the user's next request, replacing any earlier one."""
        with self._lock:
            self._drop(identity)
            self._unwritten.pop(identity, None)
            self._inserted[identity] = session

    def drop_inserted(self, identity: Identity) -> None:
        """Drops an inserted session that the user's next request cannot use."""
        with self._lock:
            self._inserted.pop(identity, None)

    def restored(self, identity: Identity, tokens: int) -> None:
        """Counts tokens restored to a slot, and drops the session in memory."""
        with self._lock:
            self._restored += 1
            self._restored_tokens += tokens
            self._inserted.pop(identity, None)
            self._drop(identity)

    def discard(self, identity: Identity) -> None:
        """`forget` without waiting; logs files that cannot be removed."""
        self._begin_removal(identity).add_done_callback(_log_failure)

    def forget(self, identity: Identity) -> None:
        """Removes a session from memory and disk; waits for the disk.

        Raises:
            EngineClosedError: there is a folder, and the store is closed.
            OSError: a file could not be removed.
        """
        if self.folder is not None and self._closed.is_set():
            raise EngineClosedError("the engine is closed; it removes no sessions")
        self._begin_removal(identity).result()

    def _begin_removal(self, identity: Identity) -> Future[None]:
        """Drops a session from memory, and removes its file after pending writes."""
        removed: Future[None] = Future()
        with self._lock:
            self._drop(identity)
            self._unwritten.pop(identity, None)
            self._loads.pop(identity, None)
            self._inserted.pop(identity, None)
            if self.folder is not None:
                self._removing[identity] += 1
        if self.folder is None:
            removed.set_result(None)
        else:
            run_on(self._writer, partial(self._remove, self.folder, identity, removed))
        return removed

    def read(self, identity: Identity) -> Optional[Session]:
        """Returns the session from memory or disk, without removing it. Waits for the disk."""
        with self._lock:
            found = self._inserted.get(identity) or self._in_memory(identity)
            is_on_disk = self.folder is not None and not self._removing[identity]
        return found or (self.folder.load(identity) if self.folder and is_on_disk else None)

    def list(self, owner: bytes) -> list[SessionInfo]:
        """Lists a tenant's sessions in memory and on disk, including copies of those in slots."""
        prefix = self.owner(owner)
        with self._lock:
            self._make_room()
            held = {key: one for key, one in self._all().items() if key.owner == prefix}
            names = {identity.name for identity in held}
            infos = [
                SessionInfo(self._names.get(key.name), "memory", len(one.token_ids), one.nbytes)
                for key, one in held.items()
            ]
            known = dict(self._names)
        files = self.folder.of_owner(prefix) if self.folder else []
        for name, nbytes in files:
            if name not in names:
                infos.append(SessionInfo(known.get(name), "disk", None, nbytes))
        return infos

    def counts(self) -> SessionCounts:
        with self._lock:
            held = self._all()
            return SessionCounts(
                in_memory=len(held),
                memory_bytes=sum(session.nbytes for session in held.values()),
                on_disk=self.folder.count if self.folder else 0,
                disk_bytes=self.folder.nbytes if self.folder else 0,
                saved=self._saved,
                restored=self._restored,
                restored_tokens=self._restored_tokens,
            )

    def close(self) -> None:
        """Waits until all sessions are written."""
        self._closed.set()
        self._writer.shutdown()
        self._readers.shutdown()

    def _all(self) -> dict[Identity, Session]:
        """Returns all sessions in memory, except those read for a waiting request."""
        kept = {key: one for key, (_, one) in self._kept.items()}
        return {**kept, **self._unwritten, **self._inserted}

    def _in_memory(self, identity: Identity) -> Optional[Session]:
        return self._unwritten.get(identity) or self._find(identity)

    def _find(self, identity: Identity) -> Optional[Session]:
        used, session = self._kept.get(identity, (0.0, None))
        if session is None:
            return None
        if time.monotonic() - used > self._ttl:
            self._drop(identity)
            return None
        self._kept.move_to_end(identity)
        return session

    def _drop(self, identity: Identity) -> None:
        _, session = self._kept.pop(identity, (0.0, None))
        self._kept_bytes -= session.nbytes if session else 0

    def _make_room(self) -> None:
        now = time.monotonic()
        for identity in [key for key, (used, _) in self._kept.items() if now - used > self._ttl]:
            self._drop(identity)
        while self._kept_bytes > self._memory:
            self._drop(next(iter(self._kept)))

    def _collect(self) -> None:
        """Drops expired sessions regularly until `close`, even if nothing is saved."""
        while not self._closed.wait(COLLECT_SECONDS):
            with self._lock:
                self._make_room()
            if self.folder is None:
                continue
            try:
                # On the writer thread, so that no file is removed that is just being replaced.
                self._writer.submit(self.folder.collect).result()
            except RuntimeError:  # the executor is shut down
                return

    # On the reader and writer threads.

    def _write(self, identity: Identity) -> None:
        with self._lock:
            session = self._unwritten.get(identity)
        if session is None or self.folder is None:
            return  # forgotten, or written with an earlier call
        try:
            self.folder.save(identity, session)
        except Exception:
            logger.exception("a session is not written")
        with self._lock:
            if self._unwritten.get(identity) is session:
                del self._unwritten[identity]
        self.on_change()

    def _read(self, folder: SessionFolder, identity: Identity, load: _Load) -> None:
        try:
            load.session = folder.load(identity)
        except Exception:
            logger.exception("a session is ignored: it could not be read")
        load.done = True
        self.on_change()

    def _remove(self, folder: SessionFolder, identity: Identity, removed: Future[None]) -> None:
        try:
            folder.forget(identity)
        except Exception as error:
            failure: Optional[Exception] = error
        else:
            failure = None
        with self._lock:
            self._removing -= Counter([identity])
        if failure is None:
            removed.set_result(None)
        else:
            removed.set_exception(failure)


def _log_failure(removed: Future[None]) -> None:
    if removed.exception() is not None:
        logger.warning("a session is not removed: %s", removed.exception())
