"""Stores responses for `previous_response_id`, reading and deletion."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.large_json import encode_large
from glm_multiuser.server.settings import Limits


class StoredResponse(NamedTuple):
    """A response, and the messages that precede those of the next request, as JSON."""

    response: bytes
    messages: bytes


class ResponseStore:
    """Responses of all sessions, in memory. Used on the event loop only, so it needs no lock.

    The user, `KEY/SESSION`, is part of every lookup, so other users' responses are not found. Over
    the limit, the key that stores most loses its least recently used response, so other keys'
    requests never take a key's equal share.

    Args:
        limits: contain `response_bytes`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.response_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes_of: Counter[str] = Counter()

    def put(self, user: str, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Stores a response of this user, unless it is larger than the limit."""
        stored = StoredResponse(encode_large(response).encode(), json.dumps(messages).encode())
        size = sum(map(len, stored))
        if size > self._limit:
            return  # all others of its key would make room for it, and it would be lost, too
        self._stored[user, response["id"]] = stored
        self._bytes_of[_key_of(user)] += size
        while sum(self._bytes_of.values()) > self._limit:
            ((key, _),) = self._bytes_of.most_common(1)
            self._forget(next(name for name in self._stored if _key_of(name[0]) == key))

    def get(self, user: Optional[str], response_id: str) -> StoredResponse:
        """Returns a response of this user.

        Raises:
            APIError: 404, there is none, or it belongs to another user.
        """
        found = self._stored.get((user or "", response_id))
        if found is None:
            message = f"response_id is {response_id[:80]!r}; this session has no such response"
            raise APIError(404, "response_not_found", message, "response_id")
        self._stored.move_to_end((user or "", response_id))
        return found

    def messages_before(self, user: Optional[str], previous: Optional[str]) -> list[dict[str, Any]]:
        """Messages of the conversation up to the previous response; empty without one.

        Raises:
            APIError: 400, this user has no such response.
        """
        if previous is None:
            return []
        try:
            messages: list[dict[str, Any]] = json.loads(self.get(user, previous).messages)
        except APIError as error:
            message = f"previous_{error}"
            code = "previous_response_not_found"
            raise APIError(400, code, message, "previous_response_id") from None
        return messages

    def delete(self, user: Optional[str], response_id: str) -> None:
        """Deletes a response. Raises as `get`."""
        self.get(user, response_id)
        self._forget((user or "", response_id))

    def _forget(self, name: tuple[str, str]) -> None:
        key = _key_of(name[0])
        self._bytes_of[key] -= sum(map(len, self._stored.pop(name)))
        if not self._bytes_of[key]:
            del self._bytes_of[key]


def _key_of(user: str) -> str:
    return user.partition("/")[0]
