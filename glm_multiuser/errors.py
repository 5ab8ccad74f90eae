"""Every error that this library raises on purpose.

    GLMMultiUserError
    ├── ConfigError             a setting or a shape of a model that cannot work
    ├── CheckpointError         a file of a checkpoint that is missing, broken or does not fit
    ├── PatchError              a MindFormers that is missing, unknown, changed or in use
    ├── RequestError            a request that was refused before it entered the engine
    │   ├── PromptTooLongError
    │   ├── InvalidParameterError
    │   └── UserBusyError       this user already has as many requests waiting as one user may
    ├── QueueFullError          the engine has as many requests waiting as it may; try later
    ├── EngineClosedError       the engine was closed, or is closing and takes nothing new
    └── GenerationError         this one request failed while it ran; nobody else noticed

Each message names the field, the value that it had and the limit that it broke.
"""

from __future__ import annotations


class GLMMultiUserError(Exception):
    """Root of the tree: catch it to catch everything that this library raises on purpose."""


class ConfigError(GLMMultiUserError):
    """A setting or a shape of a model that cannot work."""


class CheckpointError(GLMMultiUserError):
    """A checkpoint that is missing, broken, or does not fit the model."""


class PatchError(GLMMultiUserError):
    """A MindFormers that cannot be patched: unknown, changed, not writable or already in use."""


class RequestError(GLMMultiUserError):
    """A request that was refused before it entered the engine."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer in the sequence length."""


class InvalidParameterError(RequestError):
    """A sampling parameter, user name or history that is out of range."""


class UserBusyError(RequestError):
    """This user already has as many requests waiting as one user may have."""


class QueueFullError(GLMMultiUserError):
    """As many requests are waiting as may wait; nothing that was accepted is lost."""


class EngineClosedError(GLMMultiUserError):
    """The engine is closed, or is closing and takes no new requests."""


class GenerationError(GLMMultiUserError):
    """This request failed while it ran: non-finite logits or a device error."""
