"""The exceptions of this library.

    GLMMultiUserError
    ├── ConfigError             an invalid setting or model shape
    ├── CheckpointError         a checkpoint file that is missing, broken or does not fit
    ├── SessionError            a saved session that is missing, damaged, or of another engine
    ├── PatchError              a MindFormers that is missing, unknown, changed or in use
    ├── RequestError            a request that was rejected at admission; `field` names its field
    │   ├── PromptTooLongError
    │   ├── InvalidParameterError
    │   └── UserBusyError       one user has too many requests waiting; try later
    ├── TooManyRequestsError    over capacity; accepted requests are not affected
    │   ├── QueueFullError      the engine has too many requests waiting; try later
    │   └── UserBusyError
    ├── EngineClosedError       the engine is closed, or is closing and rejects new requests
    └── GenerationError         this request failed while it ran; others are not affected

Each message names the field, its value and the limit.
"""

from __future__ import annotations

from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, Optional, TypeVar

Value = TypeVar("Value")


class GLMMultiUserError(Exception):
    """Base class of this library's exceptions."""


class ConfigError(GLMMultiUserError):
    """An invalid setting or model shape."""


class CheckpointError(GLMMultiUserError):
    """A checkpoint that is missing, broken, or does not fit the model."""


class SessionError(GLMMultiUserError):
    """A saved session that is missing, damaged, or belongs to another model or setting."""


class PatchError(GLMMultiUserError):
    """A MindFormers that cannot be patched: unknown, changed, not writable or already in use."""


class RequestError(GLMMultiUserError):
    """A request that was rejected at admission.

    Args:
        message: names the field, its value and the limit.
        field: the invalid argument of `submit` or attribute of `SamplingParams`; None if it is
            neither.
    """

    def __init__(self, message: str, field: Optional[str] = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer."""


class InvalidParameterError(RequestError):
    """An invalid prompt, sampling parameter, user name or history."""


class TooManyRequestsError(GLMMultiUserError):
    """Over capacity; try again later. Accepted requests are not affected."""


class QueueFullError(TooManyRequestsError):
    """The engine has too many requests waiting."""


class UserBusyError(RequestError, TooManyRequestsError):
    """This user has too many requests waiting."""


class EngineClosedError(GLMMultiUserError):
    """The engine is closed, or is closing and rejects new requests."""


class GenerationError(GLMMultiUserError):
    """This request failed while it ran: non-finite logits or a device error."""


def shown(value: object) -> str:
    """Formats a value for a message: its `repr`, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int beyond Python's limit of digits
        text = f"<{type(value).__name__}>"
    # NumPy 1 writes its scalars as Python writes numbers, which the message may ask for.
    if type(value).__module__ == "numpy" and "(" not in text:
        text = f"np.{type(value).__name__}({text})"
    return text if len(text) <= 80 else text[:77] + "..."


def check_kind(field: str, value: Value, *kinds: Any) -> Value:
    """Returns the value; raises InvalidParameterError unless it has one of these types."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be of type {names}", field)
    return value


def check_seconds(field: str, value: Any) -> float:
    """Returns `value`, at most TIMEOUT_MAX; raises InvalidParameterError if it is no number."""
    if not isinstance(value, Real) or value != value:
        raise InvalidParameterError(
            f"{field} is {shown(value)}; it must be a number of seconds", field
        )
    return float(value) if value < TIMEOUT_MAX else TIMEOUT_MAX
