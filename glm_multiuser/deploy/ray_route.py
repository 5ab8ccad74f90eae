"""Which replica a request goes to: whose it is, and which replicas count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

from starlette.datastructures import Headers

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.kserve.infer_codec import JSON_LENGTH, decompress, split
from glm_multiuser.server.request_context import SESSION_HEADER

STEP_PATH = "/llm/generate"


@dataclass(frozen=True)
class Route:
    """What the router hashes and obeys. Ray carries it as the session id of a call, a text.

    Attributes:
        user: equal ones go to the same replica; empty: to the one with the least to do.
        holder: the replica that has what this request is about; empty: any.
        without: replicas that have turned this request away.
    """

    user: str = ""
    holder: str = ""
    without: tuple[str, ...] = ()

    def encode(self) -> str:
        return json.dumps([self.user, self.holder, self.without])

    @classmethod
    def decode(cls, text: str) -> Route:
        if not text:
            return cls()
        user, holder, without = json.loads(text)
        return cls(user, holder, tuple(without))

    def avoiding(self, replica: str) -> Route:
        """The same, but for one replica more that does not count."""
        return replace(self, without=(*self.without, replica))


def user_of(path: str, headers: Headers, body: bytes, caller: Caller, most: int) -> str:
    """Whose slot a request will take, as the replica will see it; empty: any.

    A body that cannot be read has no user: the replica will say what is wrong with it.

    Args:
        most: bytes of a body that was compressed.

    Raises:
        Refusal: 400, a session's name that is none.
    """
    if path == STEP_PATH:
        # What came so far lies with the replica that began: the id says which, not the session.
        return f"{caller.key}/{_member(_json(body), 'cache_id')}"
    session = headers.get(SESSION_HEADER) or _session_in(path, headers, body, most)
    return caller.user(session) or ""


def _session_in(path: str, headers: Headers, body: bytes, most: int) -> Optional[str]:
    if path.startswith("/v1/"):
        user = _member(_json(body), "user")
        return user if isinstance(user, str) else None
    if not path.startswith("/v2/models/"):
        return None
    try:
        plain = decompress(body, headers.get("content-encoding"), most)
        fields = _json(split(plain, headers.get(JSON_LENGTH))[0])
    except GLMMultiUserError:
        return None
    inside = _member(_member(fields, "parameters"), "sequence_id")
    found = _member(fields, "sequence_id") if inside is None else inside
    return str(found) if found and isinstance(found, (str, int)) else None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
