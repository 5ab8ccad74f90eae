"""Many users talk to one GLM model on one device at the same time."""

from glm_multiuser.answer import GenerationResult, Logprob, Piece, Timings, Usage
from glm_multiuser.config import EngineConfig, ModelConfig
from glm_multiuser.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    GenerationError,
    GLMMultiUserError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UserBusyError,
)
from glm_multiuser.handle import Handle
from glm_multiuser.llm import EngineStats, MultiUserLLM
from glm_multiuser.sampling import SamplingParams

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "GLMMultiUserError",
    "GenerationError",
    "GenerationResult",
    "Handle",
    "InvalidParameterError",
    "Logprob",
    "ModelConfig",
    "MultiUserLLM",
    "Piece",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "Timings",
    "Usage",
    "UserBusyError",
]
