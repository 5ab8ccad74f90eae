"""Many users talk to one GLM model on one device at the same time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_multiuser.answer import GenerationResult, Logprob, Piece, Timings, Usage
    from glm_multiuser.config import CausalConfig, EngineConfig, ModelConfig
    from glm_multiuser.errors import (
        CheckpointError,
        ConfigError,
        EngineClosedError,
        GenerationError,
        GLMMultiUserError,
        InvalidParameterError,
        PatchError,
        PromptTooLongError,
        QueueFullError,
        RequestError,
        UserBusyError,
    )
    from glm_multiuser.handle import Handle
    from glm_multiuser.llm import EngineStats, MultiUserLLM
    from glm_multiuser.sampling import SamplingParams

_MODULES = {
    "answer": ("GenerationResult", "Logprob", "Piece", "Timings", "Usage"),
    "config": ("CausalConfig", "EngineConfig", "ModelConfig"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "EngineClosedError",
        "GLMMultiUserError",
        "GenerationError",
        "InvalidParameterError",
        "PatchError",
        "PromptTooLongError",
        "QueueFullError",
        "RequestError",
        "UserBusyError",
    ),
    "handle": ("Handle",),
    "llm": ("EngineStats", "MultiUserLLM"),
    "sampling": ("SamplingParams",),
}

__all__ = [
    "CausalConfig",
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
    "PatchError",
    "Piece",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "Timings",
    "Usage",
    "UserBusyError",
]


def __getattr__(name: str) -> Any:
    # Imported when first used: MindSpore takes seconds to import, and the command's --help and
    # its handling of Ctrl-C must come before it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
