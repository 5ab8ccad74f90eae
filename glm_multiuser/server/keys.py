"""Authentication: API keys, and the users of a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.errors import APIError

ENVIRONMENT = "GLM_MULTIUSER_API_KEYS"
KEY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[\x21-\x7e]{16,512}")
SESSION_LENGTH_MAX = 256
ANONYMOUS = "anonymous"
WRONG_KEY = "invalid_api_key"
"""Error code for a wrong key."""
ADMIN = "admin"
"""The only role; it is needed to control models with the setting `model_control="keys"`."""


@dataclass(frozen=True)
class Caller:
    """An authenticated client, identified by the name of its key.

    Attributes:
        key: name of the key.
        admin: whether it has the role admin.
        owner: digest of the key itself, which owns its sessions on disk: a new key with the same
            name does not get them. b"" without keys.
    """

    key: str = ANONYMOUS
    admin: bool = False
    owner: bytes = field(default=b"", repr=False, compare=False)

    def user(self, session: Optional[str]) -> Optional[str]:
        """Returns the owner of a request's slot: the session, within this key; None: any slot.

        Raises:
            APIError: 400, the name is too long or not printable.
        """
        if not session:
            return None
        if len(session) > SESSION_LENGTH_MAX or not session.isprintable():
            raise APIError(
                400,
                "invalid_session",
                f"the session's name has {len(session)} characters; it must have at most "
                f"{SESSION_LENGTH_MAX}, all printable",
                field="user",
            )
        # Names of keys have no slash, so no session can access another key's.
        return f"{self.key}/{session}"

    def session_of(self, user: object) -> Optional[str]:
        """The inverse of `user`; None if the session belongs to another key."""
        key, slash, session = str(user).partition("/")
        return session if slash and key == self.key else None


class KeyRing:
    """The API keys of this server. Without keys, every client is the anonymous caller.

    Args:
        keys: name -> key.
        admins: names of keys with the role admin.
    """

    def __init__(self, keys: Mapping[str, str], admins: Collection[str] = ()) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}
        self._admins = frozenset(admins)

    def caller(self, authorization: Optional[str], api_key: Optional[str] = None) -> Caller:
        """Authenticates a client by its headers.

        Args:
            authorization: `Authorization`; a bearer token takes precedence.
            api_key: `x-api-key`, which Anthropic's clients send.

        Raises:
            APIError: 401, no key or a wrong one.
        """
        if not self._digests:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            key = api_key or ""
        if not key:
            raise APIError(
                401,
                "missing_api_key",
                "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            )
        digest = _digest(key.strip())
        # All keys are compared, so that the time does not reveal which one is close.
        found = [
            name for name, known in self._digests.items() if hmac.compare_digest(known, digest)
        ]
        if not found:
            raise APIError(401, WRONG_KEY, "this API key is not known here")
        return Caller(found[0], found[0] in self._admins, digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys(NamedTuple):
    """API keys by name, and the names of those with the role admin."""

    keys: dict[str, str]
    admins: frozenset[str]


def read_keys(path: Optional[Path]) -> Keys:
    """Reads keys from a file and from the environment variable `GLM_MULTIUSER_API_KEYS`.

    A line of the file is `KEY`, `NAME KEY` or `NAME KEY admin`; empty lines and lines that begin
    with # are ignored. The environment variable has the same format, with commas instead of line
    ends.

    Raises:
        ConfigError: the file cannot be read or has no key; a name or key is invalid or duplicate.
    """
    lines: list[tuple[str, str]] = []
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
        lines = [(f"line {number} of {path}", line) for number, line in _numbered(text, "\n")]
        if not any(line for _, line in lines):
            raise ConfigError(
                f"{path} holds no API key; without --api-keys every client is accepted"
            )
    from_environment = os.environ.get(ENVIRONMENT, "")
    lines += [
        (f"entry {number} of {ENVIRONMENT}", line)
        for number, line in _numbered(from_environment, ",")
    ]
    keys: dict[str, str] = {}
    admins: set[str] = set()
    for place, line in lines:
        name, key, *role = _read_line(place, line, default=f"key-{len(keys) + 1}")
        if name in keys or key in keys.values():
            raise ConfigError(f"{place} has the name or the key of an earlier one")
        keys[name] = key
        admins.update({name} if role else ())
    return Keys(keys, frozenset(admins))


def _numbered(text: str, separator: str) -> list[tuple[int, str]]:
    lines = [(number, line.strip()) for number, line in enumerate(text.split(separator), start=1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _read_line(place: str, line: str, default: str) -> list[str]:
    """Parses name, key, and optional role. Errors never show the line: it contains a secret."""
    words = line.split()
    if len(words) == 1:
        words.insert(0, default)
    name, key, *role = words
    if role not in ([], [ADMIN]) or not KEY_NAME.fullmatch(name):
        raise ConfigError(
            f"{place} is not a name and a key, or a name, a key and the role {ADMIN}; a name is "
            "1 to 64 letters, digits, '.', '_' or '-'"
        )
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"{place} has a key of {len(key)} characters; it must have 16 to 512 of ASCII"
        )
    return words
