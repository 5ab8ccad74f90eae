"""HTTP errors: the status of each error, and its body in each protocol."""

from __future__ import annotations

import http
import json
import math
from typing import Any, Optional

from starlette.responses import Response

from glm_multiuser.errors import (
    EngineClosedError,
    GenerationError,
    GLMMultiUserError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UserBusyError,
)


class APIError(GLMMultiUserError):
    """An error with its HTTP status.

    Args:
        status: HTTP status.
        code: machine-readable name.
        message: for people; names the field, the value and the limit.
        field: the invalid field of the request.
        retry_after: seconds for the header Retry-After; default with 503:
            NOT_READY_RETRY_SECONDS.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: Optional[str] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        if retry_after is None and status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            retry_after = NOT_READY_RETRY_SECONDS
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None and math.isfinite(self.retry_after):
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == http.HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == http.HTTPStatus.REQUEST_TIMEOUT:
            headers["Connection"] = "close"
        if self.status == http.HTTPStatus.GATEWAY_TIMEOUT:  # OpenAI's and Anthropic's clients retry
            headers["X-Should-Retry"] = "false"
        return headers


BAD_REQUEST = "invalid_value"
NO_THREADS = "thread_unsupported_request"
"""Anthropic's own code, on which its client sends the whole conversation instead."""
ANTHROPIC_PATH = "/v1/messages"
NOT_READY_RETRY_SECONDS = 2.0

# (class, status, code): the first match counts, so subclasses come first.
_STATUS: tuple[tuple[type[GLMMultiUserError], int, str], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (UserBusyError, 429, "user_busy"),
    (RequestError, 400, BAD_REQUEST),
    (QueueFullError, 429, "queue_full"),
    (EngineClosedError, 503, "not_ready"),
    (GenerationError, 500, "generation_failed"),
)


def api_error_of(error: Exception, retry_after: Optional[float] = None) -> APIError:
    """Returns the HTTP error for an exception.

    Args:
        error: of this library; any other is a defect, whose text is not shown to clients.
        retry_after: seconds, for 429 and 503.
    """
    if isinstance(error, APIError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            passes = status in (429, 503)
            wait = (retry_after or NOT_READY_RETRY_SECONDS) if passes else None
            field = error.field if isinstance(error, RequestError) else None
            return APIError(status, code, str(error), field, retry_after=wait)
    return APIError(500, "internal_error", "the server failed; its log says why")


def bad_request(message: str, field: Optional[str] = None) -> APIError:
    """400: a field of the request is invalid."""
    return APIError(400, BAD_REQUEST, message, field)


def deadline_error(seconds: float) -> APIError:
    """504: a request exceeded its deadline."""
    return APIError(504, "deadline_exceeded", f"the request took more than {seconds:g} seconds")


def openai_body(error: APIError) -> dict[str, Any]:
    """The error object of OpenAI's API."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.field,
            "code": error.code,
        }
    }


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: APIError) -> dict[str, Any]:
    """The error object of Anthropic's API, with our code."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    described: dict[str, Any] = {"type": kind, "message": str(error), "code": error.code}
    if error.code == NO_THREADS:
        described["details"] = {"error_code": error.code}
    return {"type": "error", "error": described}


def plain_body(error: APIError) -> dict[str, Any]:
    """The error object of KServe v2, where `error` is a string, with our code."""
    return {"error": str(error), "code": error.code}


def error_body(path: str, error: APIError) -> dict[str, Any]:
    """The error object of the protocol that `path` belongs to."""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_body(error)
    return openai_body(error) if path.startswith("/v1/") else plain_body(error)


def error_response(path: str, error: APIError) -> Response:
    body = json.dumps(error_body(path, error), ensure_ascii=False, separators=(",", ":"))
    # A message may quote half of a surrogate pair: UTF-8 has no bytes for it, but JSON an escape.
    content = body.encode("utf-8", "backslashreplace")
    return Response(content, error.status, error.headers, "application/json")
