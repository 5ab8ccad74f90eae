"""Where the answer to one request of Triton goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from glm_multiuser.errors import (
    GLMMultiUserError,
    QueueFullError,
    RequestError,
    UserBusyError,
)
from glm_multiuser.handle import Handle

logger = logging.getLogger(__name__)

# (class, name of Triton's code): the first one that fits counts, so subclasses come first. Names,
# because Triton fills its module only when it has imported the model.
CODES: tuple[tuple[type[Exception], str], ...] = (
    (UserBusyError, "UNAVAILABLE"),
    (QueueFullError, "UNAVAILABLE"),
    (RequestError, "INVALID_ARG"),
    (Exception, "INTERNAL"),
)


class Reply:
    """The answer to one request, however many responses it takes.

    A request may be asked whether it is cancelled only until its last response has been sent: then
    Triton forgets it. So both happen under a lock.

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
        """Sends a response.

        Args:
            outputs: {name: a text for each row}.
            last: whether nothing follows.
        """
        tensors = [
            pb_utils.Tensor(name, np.array([[text.encode()] for text in texts], np.object_))
            for name, texts in outputs.items()
        ]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), last)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error; one that is none of ours is logged, and not told."""
        message = str(error)
        if not isinstance(error, GLMMultiUserError):
            logger.error("request failed", exc_info=error)
            message = "the model failed; its log says why"
        self._send_error(message, next(code for kind, code in CODES if isinstance(error, kind)))

    def say_cancelled(self) -> None:
        """Ends a request that nobody waits for any more."""
        self._send_error("the request was cancelled", "CANCELLED")

    def cancel_if_left(self) -> None:
        """Frees the slots of the request if its client has cancelled it or has gone."""
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
