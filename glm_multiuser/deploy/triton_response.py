"""Sends the responses to one Triton request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from glm_multiuser.errors import GLMMultiUserError, RequestError, TooManyRequestsError
from glm_multiuser.handle import Handle

logger = logging.getLogger(__name__)

# (class, name of Triton's code): the first match wins, so subclasses come first. Names, because
# Triton populates its module only after importing the model.
CODES: tuple[tuple[type[Exception], str], ...] = (
    (TooManyRequestsError, "UNAVAILABLE"),
    (RequestError, "INVALID_ARG"),
    (Exception, "INTERNAL"),
)


class TritonResponse:
    """The response to one request, in one or more parts.

    Cancellation can be queried only until the last part has been sent, so both happen under a lock.

    Args:
        sender: Triton's response sender.
        handles: of the rows of the request.
    """

    def __init__(self, sender: Any, handles: Sequence[Handle] = ()) -> None:
        self._sender = sender
        self._handles = handles
        self._lock = threading.Lock()
        self._ended = False

    def send(self, outputs: Mapping[str, Sequence[str]], last: bool) -> None:
        """Sends a part of the response.

        Args:
            outputs: {name: a text for each row}.
            last: whether this is the last part.
        """
        tensors = [
            pb_utils.Tensor(name, np.array([[text.encode()] for text in texts], np.object_))
            for name, texts in outputs.items()
        ]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), last)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error; internal errors are logged and not sent."""
        message = str(error)
        if not isinstance(error, GLMMultiUserError):
            logger.error("request failed", exc_info=error)
            message = "the model failed; its log says why"
        self._send_error(message, next(code for kind, code in CODES if isinstance(error, kind)))

    def send_cancelled(self) -> None:
        """Ends a request that was cancelled."""
        self._send_error("the request was cancelled", "CANCELLED")

    def cancel_if_disconnected(self) -> None:
        """Frees the slots of the request if its client has cancelled it or disconnected."""
        with self._lock:
            if self._ended or not self._sender.is_cancelled():
                return
        for handle in self._handles:
            handle.cancel()

    def _send_error(self, message: str, code: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), last=True)

    def _send(self, response: Any, last: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        with self._lock:
            self._ended = self._ended or last
            self._sender.send(response, flags=flags)
