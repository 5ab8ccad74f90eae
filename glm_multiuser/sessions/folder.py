"""The session folder: files of many users, models and servers, with limits of size and age."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

from glm_multiuser.errors import SessionError
from glm_multiuser.sessions.file import read_file, write_file
from glm_multiuser.sessions.identity import SECRET_NAME, Identity, read_secret, write_secret
from glm_multiuser.sessions.session import Session

logger = logging.getLogger(__name__)

SUFFIX = ".session"
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{16}\.session")
REMAINS = re.compile(rf"\.({NAME.pattern}|{SECRET_NAME})-\w+\.part")
"""Names of partial files; files with other names are never touched."""
REMAINS_SECONDS = 3600.0
"""Age from which a partial file is considered abandoned."""


class Found(NamedTuple):
    """A session file in the folder.

    Attributes:
        used: Unix time of the last use.
    """

    used: float
    nbytes: int
    path: Path


class SessionFolder:
    """Session files of one engine, in a folder that others may share.

    Problems with files or the folder are not errors: the session is lost, its prompt is recomputed,
    and a warning is logged, once until the folder works again.

    Args:
        path: of the folder, which is created with mode 0700.
        limit: bytes of all files; beyond it, the least recently used are removed.
        ttl: seconds since its last use after which a session is removed.
        fingerprint: of the engine.

    Raises:
        OSError: the folder, or its secret, cannot be used.
    """

    def __init__(self, path: Path, limit: int, ttl: float, fingerprint: str) -> None:
        self.path = path
        self.secret = open_folder(path)
        self._limit, self._ttl, self._fingerprint = limit, ttl, fingerprint
        self._works = True
        self._changing = threading.Lock()
        self.count = self.nbytes = 0
        """Number and bytes of files at the last `collect`, and of those saved since."""
        self.collect()

    def save(self, identity: Identity, session: Session) -> bool:
        """Writes a session, replacing an earlier one; returns whether it succeeded."""
        if session.nbytes > self._limit:
            return False
        path = self._file(identity)
        before = _size(path)
        try:
            write_secret(self.path, self.secret)  # without it, a restart would not find the file
            write_file(path, session, self._fingerprint, identity.name)
        except OSError as error:
            self._failed("sessions are not written", error)
            return False
        self._works = True
        with self._changing:
            self.count += not before
            self.nbytes += _size(path) - before
        if self.nbytes > self._limit:
            self.collect()
        return True

    def load(self, identity: Identity) -> Optional[Session]:
        """Reads the session of this identity; None if there is no usable one."""
        path = self._file(identity)
        try:
            if time.time() - path.stat().st_mtime > self._ttl:
                with suppress(OSError):  # if it is read-only, it is ignored again next time
                    path.unlink()
                return None
            session = read_file(path, self._fingerprint, identity.name)
        except FileNotFoundError:
            return None
        except SessionError as error:
            logger.warning("a session is ignored: %s", error)
            with suppress(OSError):  # if it is read-only, it is ignored again next time
                path.unlink()
            return None
        except OSError as error:
            self._failed("sessions are not read", error)
            return None
        with suppress(OSError):  # read-only, or removed by another server
            os.utime(path)
        return session

    def forget(self, identity: Identity) -> None:
        """Removes all files of this identity, including those of other weights and settings.

        Raises:
            OSError: a file could not be removed.
        """
        for path in self.path.glob(f"{identity.name}-*{SUFFIX}"):
            path.unlink(missing_ok=True)
        self.collect()

    def of_owner(self, owner: str) -> list[tuple[str, int]]:
        """Lists a tenant's files for this engine: name of the identity, and bytes."""
        end = f"-{self._fingerprint[:16]}{SUFFIX}"
        oldest = time.time() - self._ttl
        return [
            (found.path.name[: -len(end)], found.nbytes)
            for found in self._files()
            if found.used >= oldest
            and found.path.name.startswith(f"{owner}-")
            and found.path.name.endswith(end)
        ]

    def collect(self) -> None:
        """Removes expired sessions, and beyond the limit, the least recently used."""
        with self._changing:
            now = time.time()
            total = count = 0
            for used, nbytes, path in sorted(self._files(), reverse=True):
                try:
                    if used > now:  # the clock was set back, and the file would not expire
                        os.utime(path)
                    if now - used > self._ttl or total + nbytes > self._limit:
                        path.unlink(missing_ok=True)
                        continue
                except OSError as error:
                    self._failed("a session is not removed", error)
                total, count = total + nbytes, count + 1
            self.count, self.nbytes = count, total

    def _files(self) -> Iterator[Found]:
        """Yields all session files; removes partial files of processes that ended while writing."""
        try:
            entries = list(os.scandir(self.path))
        except OSError as error:
            self._failed("sessions cannot be listed", error)
            return
        for entry in entries:
            try:
                state = entry.stat(follow_symlinks=False)
                if NAME.fullmatch(entry.name):
                    yield Found(state.st_mtime, state.st_size, Path(entry.path))
                elif (
                    REMAINS.fullmatch(entry.name) and time.time() - state.st_mtime > REMAINS_SECONDS
                ):
                    os.unlink(entry.path)
            except OSError:
                continue  # removed by another server

    def _file(self, identity: Identity) -> Path:
        return self.path / f"{identity.name}-{self._fingerprint[:16]}{SUFFIX}"

    def _failed(self, what: str, error: OSError) -> None:
        if self._works:
            logger.warning("%s, and prompts are computed: %s: %s", what, self.path, error)
        self._works = False


def open_folder(path: Path) -> bytes:
    """Creates a session folder and its secret unless they are there; returns the secret.

    Raises:
        OSError: as `SessionFolder`.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return read_secret(path)


def _size(path: Path) -> int:
    """Bytes of a file; 0 if there is none, or another server has just removed it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
