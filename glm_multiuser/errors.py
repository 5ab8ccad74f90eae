"""Every error that this library raises on purpose.

    GLMMultiUserError
    ├── ConfigError             a setting or a shape of a model that cannot work
    ├── CheckpointError         a file of a checkpoint that is missing, broken or does not fit
    ├── SessionError            a saved session that is missing, damaged, or of another engine
    ├── PatchError              a MindFormers that is missing, unknown, changed or in use
    ├── RequestError            a request that was rejected at admission; `field` names its field
    │   ├── PromptTooLongError
    │   ├── InvalidParameterError
    │   └── UserBusyError       one user has as many requests waiting as it may; try later
    ├── TooManyRequestsError    over capacity; nothing that was accepted is lost
    │   ├── QueueFullError      the engine has as many requests waiting as it may; try later
    │   └── UserBusyError
    ├── EngineClosedError       the engine was closed, or is closing and accepts no new requests
    └── GenerationError         this one request failed while it ran; others are not affected

Each message names the field, the value that it had and the limit that it broke.
"""

from __future__ import annotations

from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, Optional, TypeVar

Value = TypeVar("Value")


class GLMMultiUserError(Exception):
    """Root of the tree: catch it to catch everything that this library raises on purpose."""


class ConfigError(GLMMultiUserError):
    """A setting or a shape of a model that cannot work."""


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
        field: the argument of `submit` or the attribute of `SamplingParams` that is wrong; None
            if it is none of these.
    """

    def __init__(self, message: str, field: Optional[str] = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer in the sequence length."""


class InvalidParameterError(RequestError):
    """A prompt, sampling parameter, user name or history that is not valid."""


class TooManyRequestsError(GLMMultiUserError):
    """Over capacity: try again later. Nothing that was accepted is lost."""


class QueueFullError(TooManyRequestsError):
    """As many requests are waiting as may wait."""


class UserBusyError(RequestError, TooManyRequestsError):
    """This user already has as many requests waiting as one user may have."""


class EngineClosedError(GLMMultiUserError):
    """The engine is closed, or is closing and accepts no new requests."""


class GenerationError(GLMMultiUserError):
    """This request failed while it ran: non-finite logits or a device error."""


def shown(value: object) -> str:
    """A value as a message has it: its `repr`, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def check_kind(field: str, value: Value, *kinds: Any) -> Value:
    """Returns the value; raises an InvalidParameterError unless it is of one of these types."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be of type {names}", field)
    return value


def check_seconds(field: str, value: Any) -> float:
    """Returns how long a thread may wait; raises an InvalidParameterError unless it is a number."""
    if not isinstance(value, Real) or value != value:
        raise InvalidParameterError(
            f"{field} is {shown(value)}; it must be a number of seconds", field
        )
    return float(value) if value < TIMEOUT_MAX else TIMEOUT_MAX
