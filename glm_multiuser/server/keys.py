"""Who is asking: API keys, and the users inside a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.errors import Refusal

ENVIRONMENT = "GLM_MULTIUSER_API_KEYS"
KEY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[\x21-\x7e]{16,512}")
SESSION_LENGTH_MAX = 128
ANONYMOUS = "anonymous"


@dataclass(frozen=True)
class Caller:
    """Somebody who may ask, known by the name of their key."""

    key: str = ANONYMOUS

    def user(self, session: Optional[str]) -> Optional[str]:
        """Whose slot a request takes: the session's own inside this key, or any slot.

        Raises:
            Refusal: 400, a name that is too long or cannot be printed.
        """
        if not session:
            return None
        if len(session) > SESSION_LENGTH_MAX or not session.isprintable():
            raise Refusal(
                400,
                "invalid_session",
                f"the session's name has {len(session)} characters; it must have at most "
                f"{SESSION_LENGTH_MAX}, all printable",
                field="user",
            )
        # A key's name has no slash, so no session can reach into another key.
        return f"{self.key}/{session}"

    def session_of(self, user: object) -> Optional[str]:
        """The session that `user` made this of; None if it belongs to another key."""
        key, slash, session = str(user).partition("/")
        return session if slash and key == self.key else None


class KeyRing:
    """The keys that open this server. Without keys everybody is the anonymous caller.

    Args:
        keys: name -> key.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}

    def caller(self, authorization: Optional[str]) -> Caller:
        """Who sent this `Authorization` header.

        Raises:
            Refusal: 401, no key or a wrong one.
        """
        if not self._digests:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refusal(
                401, "missing_api_key", "an API key is needed: send 'Authorization: Bearer KEY'"
            )
        digest = _digest(key.strip())
        # Every key is compared, so that the time says nothing about which one was close.
        found = [
            name for name, known in self._digests.items() if hmac.compare_digest(known, digest)
        ]
        if not found:
            raise Refusal(401, "invalid_api_key", "this API key is not known here")
        return Caller(found[0])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Optional[Path]) -> dict[str, str]:
    """Keys of a file and of the environment variable `GLM_MULTIUSER_API_KEYS`.

    A line of the file is a name and a key, or a key alone; empty lines and those that begin with
    # do not count. The environment variable holds the same, with commas for line ends.

    Raises:
        ConfigError: a file that cannot be read, a name or key that is none, one that comes twice.
    """
    lines: list[tuple[str, str]] = []
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
        lines = [(f"line {number} of {path}", line) for number, line in _numbered(text, "\n")]
        if not any(line for _, line in lines):
            raise ConfigError(f"{path} holds no API key; without --api-keys everybody may ask")
    from_environment = os.environ.get(ENVIRONMENT, "")
    lines += [
        (f"entry {number} of {ENVIRONMENT}", line)
        for number, line in _numbered(from_environment, ",")
    ]
    keys: dict[str, str] = {}
    for place, line in lines:
        name, key = _read_line(place, line, default=f"key-{len(keys) + 1}")
        if name in keys or key in keys.values():
            raise ConfigError(f"{place} has the name or the key of an earlier one")
        keys[name] = key
    return keys


def _numbered(text: str, separator: str) -> list[tuple[int, str]]:
    lines = [(number, line.strip()) for number, line in enumerate(text.split(separator), start=1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _read_line(place: str, line: str, default: str) -> tuple[str, str]:
    """The line itself is never shown: it holds a secret."""
    words = line.split()
    name, key = (default, words[0]) if len(words) == 1 else (words[0], words[-1])
    if len(words) > 2 or not KEY_NAME.fullmatch(name):
        raise ConfigError(
            f"{place} is not a name and a key; a name is 1 to 64 letters, digits, '.', '_' or '-'"
        )
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"{place} has a key of {len(key)} characters; it must have 16 to 512 of ASCII"
        )
    return name, key
