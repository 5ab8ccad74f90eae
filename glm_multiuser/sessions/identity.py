"""Identities of sessions: keyed hashes, so that nobody can compute another user's file name."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Hashable
from pathlib import Path
from tempfile import mkstemp
from typing import NamedTuple

SECRET_BYTES = 32
SECRET_NAME = "secret"


class Identity(NamedTuple):
    """Keyed hashes, in hexadecimal digits.

    Attributes:
        owner: of the tenant, 16 digits; all sessions of one API key share it.
        session: of tenant and user together, 32 digits.
    """

    owner: str
    session: str

    @property
    def name(self) -> str:
        return f"{self.owner}-{self.session}"


def identity_of(secret: bytes, owner: bytes, user: Hashable) -> Identity:
    """Returns the identity of a user, an int or a str; 1 and "1" are different users.

    Args:
        secret: of the folder, or of this process.
        owner: a secret of the tenant, such as the digest of its API key; b"" for none.
        user: as in `MultiUserLLM.submit`.
    """
    whole = json.dumps([owner.hex(), type(user).__name__, user]).encode()
    return Identity(owner_of(secret, owner), _keyed(secret, b"session", whole, 16))


def owner_of(secret: bytes, owner: bytes) -> str:
    """Returns the part of an identity that all sessions of a tenant share."""
    return _keyed(secret, b"owner", owner, 8)


def _keyed(secret: bytes, purpose: bytes, data: bytes, size: int) -> str:
    return hashlib.blake2b(data, key=secret, person=purpose, digest_size=size).hexdigest()


def read_secret(folder: Path) -> bytes:
    """Reads the secret of a session folder; creates it if there is none.

    Raises:
        OSError: it cannot be read or written, or others may read it.
    """
    path = folder / SECRET_NAME
    write_secret(folder, os.urandom(SECRET_BYTES))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise PermissionError(f"{path} can be read by others; its mode must be 0600")
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise OSError(f"{path} has {len(secret)} bytes; it must have {SECRET_BYTES}")
    return secret


def write_secret(folder: Path, secret: bytes) -> None:
    """Writes the secret of a session folder, unless it has one; if several servers start at once,
    one wins: `link` never replaces.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / SECRET_NAME
    if path.exists():
        return
    handle, name = mkstemp(".part", ".secret-", folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
