"""Session affinity: which replica a request goes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

from starlette.datastructures import Headers

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.errors import ANTHROPIC_PATH
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.kserve.infer_codec import JSON_LENGTH, decompress, split
from glm_multiuser.server.request_context import session_named

STEP_PATH = "/llm/generate"
RESPONSES_PATH = "/v1/responses"
STORED_PATH = f"{RESPONSES_PATH}/"
"""Path prefix of stored responses."""


@dataclass(frozen=True)
class Route:
    """Input of the router, which Ray transports as the session id of a call.

    Attributes:
        user: requests of one user go to the same replica; empty: to the least busy one.
        holder: the replica that holds the state of the request; empty: any.
        excluded: replicas that rejected the request.
    """

    user: str = ""
    holder: str = ""
    excluded: tuple[str, ...] = ()

    def encode(self) -> str:
        return json.dumps([self.user, self.holder, self.excluded])

    @classmethod
    def decode(cls, text: str) -> Route:
        if not text:
            return cls()
        user, holder, excluded = json.loads(text)
        return cls(user, holder, tuple(excluded))

    def excluding(self, replica: str) -> Route:
        """The same route with one more replica excluded."""
        return replace(self, excluded=(*self.excluded, replica))


def user_of(path: str, headers: Headers, body: bytes, caller: Caller, most: int) -> str:
    """Returns the user whose slot a request takes in the replica; empty: any slot.

    An invalid body has no user: the replica rejects it with the reason.

    Args:
        most: maximum size of a decompressed body, in bytes.

    Raises:
        APIError: 400, an invalid session name.
    """
    if path == STEP_PATH:
        # The replica that started holds the text so far: the id decides, not the session.
        return f"{caller.key}/{_member(_json(body), 'cache_id')}"
    session = session_named(headers) or _session_in(path, headers, body, most)
    return caller.user(session) or ""


def is_stored(path: str, body: bytes) -> bool:
    """Whether a request needs stored responses, which are in its user's replica only."""
    fields = _json(body) if path == RESPONSES_PATH else None
    return bool(_member(fields, "previous_response_id") or _member(fields, "store"))


def _session_in(path: str, headers: Headers, body: bytes, most: int) -> Optional[str]:
    if path.startswith("/v1/"):
        fields = _json(body)
        if path.startswith(ANTHROPIC_PATH):
            user = _member(_member(fields, "metadata"), "user_id")
        else:
            user = _member(fields, "user")
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
