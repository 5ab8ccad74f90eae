"""What the supervisor asks of a Triton server, over HTTP."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from glm_multiuser.errors import ConfigError

CONTROL_SECONDS = 30.0
LOAD_SECONDS = 3600.0
"""A large checkpoint takes minutes."""
PROBE = "probe"
"""Request parameter of who only wants to know whether there is an answer."""


@dataclass(frozen=True)
class Door:
    """Where the server listens for HTTP."""

    host: str
    port: int

    def is_live(self) -> bool:
        """Whether it answers at all; it does before any model is loaded."""
        try:
            return self._ask("GET", "/v2/health/live", None, CONTROL_SECONDS)[0] == 200
        except OSError:
            return False

    def state(self, model: str) -> str:
        """READY, LOADING, UNLOADING, UNAVAILABLE, or "" for a model that was never loaded.

        Raises:
            OSError, HTTPException: the server does not answer.
        """
        _, body = self._ask("POST", "/v2/repository/index", {}, CONTROL_SECONDS)
        entries = {entry["name"]: entry for entry in json.loads(body)}
        return str(entries.get(model, {}).get("state", ""))

    def load(self, model: str) -> None:
        """Returns when the model is ready.

        Raises:
            ConfigError: it cannot be loaded.
            OSError, HTTPException: the server does not answer.
        """
        path = f"/v2/repository/models/{model}/load"
        status, body = self._ask("POST", path, {}, LOAD_SECONDS)
        if status != 200:
            # Behind it comes where in the code.
            message = str(json.loads(body)["error"]).partition("\n\nAt:")[0]
            raise ConfigError(message.replace("\n", " "))

    def unload(self, model: str) -> None:
        """Returns at once; running requests end first.

        Raises:
            OSError, HTTPException: the server does not answer.
        """
        self._ask("POST", f"/v2/repository/models/{model}/unload", {}, CONTROL_SECONDS)

    def answers(self, model: str, seconds: float) -> bool:
        """Whether a model answers a question with one token, or is too busy to.

        Raises:
            OSError, HTTPException: not within these seconds.
        """
        question = {"prompt": "hi", "temperature": "0", "max_token": "1", PROBE: True}
        path = f"/v2/models/{model}/generate_stream"
        status, body = self._ask("POST", path, question, seconds)
        return status == http.HTTPStatus.SERVICE_UNAVAILABLE or (
            status == 200 and b'"history"' in body
        )

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
