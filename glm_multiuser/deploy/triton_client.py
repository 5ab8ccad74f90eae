"""HTTP client of a Triton server, to load and supervise its models."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from glm_multiuser.errors import ConfigError

CONTROL_SECONDS = 30.0
LIVE_SECONDS = 5.0
LOAD_SECONDS = 3600.0
"""A large checkpoint takes minutes."""
PROBE = "probe"
"""Request parameter of a health probe."""
BUSY = "all slots are in use; steps are being computed"
"""The error of a probe that would have to wait; its status is 400, as of any error in a stream."""

CONNECTION_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class TritonClient:
    """A client of the server at an HTTP address."""

    host: str
    port: int

    def is_live(self) -> bool:
        """Whether the server responds; it does before any model is loaded."""
        try:
            return self._request("GET", "/v2/health/live", None, LIVE_SECONDS)[0] == 200
        except CONNECTION_ERRORS:
            return False

    def state(self, model: str) -> str:
        """Returns READY, LOADING, UNLOADING, UNAVAILABLE, or "" for a model that was never loaded.

        Raises:
            OSError, HTTPException: the server does not respond.
        """
        _, body = self._request("POST", "/v2/repository/index", {}, CONTROL_SECONDS)
        entries = {entry["name"]: entry for entry in json.loads(body)}
        return str(entries.get(model, {}).get("state", ""))

    def load(self, model: str) -> None:
        """Loads a model; returns when it is ready.

        Raises:
            ConfigError: it cannot be loaded.
            OSError, HTTPException: the server does not respond.
        """
        path = f"/v2/repository/models/{model}/load"
        status, body = self._request("POST", path, {}, LOAD_SECONDS)
        if status != 200:
            # The rest is the source location.
            message = str(json.loads(body)["error"]).partition("\n\nAt:")[0]
            raise ConfigError(message.replace("\n", " "))

    def unload(self, model: str) -> None:
        """Unloads a model after its running requests have ended; returns immediately.

        Raises:
            OSError, HTTPException: the server does not respond.
        """
        self._request("POST", f"/v2/repository/models/{model}/unload", {}, CONTROL_SECONDS)

    def answers(self, model: str, seconds: float) -> bool:
        """Whether a model generates a token, or rejects the request because it is busy.

        Raises:
            OSError, HTTPException: no response within `seconds`.
        """
        request = {"prompt": "hi", "temperature": "0", "max_token": "1", PROBE: True}
        path = f"/v2/models/{model}/generate_stream"
        status, body = self._request("POST", path, request, seconds)
        return BUSY.encode() in body or (status == 200 and b'"history"' in body)

    def _request(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
