"""Serves one language model on one device to many users at once."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from glm_multiuser.answer import GenerationResult, Logprob, Piece, Timings, Usage
    from glm_multiuser.config import EngineConfig
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
        SessionError,
        TooManyRequestsError,
        UserBusyError,
    )
    from glm_multiuser.handle import Handle
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.model_config import CausalConfig, ModelConfig
    from glm_multiuser.sampling_params import SamplingParams
    from glm_multiuser.stats import EngineStats
    from glm_multiuser.structured.grammar import Grammar

__all__ = ["EngineStats", "Grammar", "Handle", "MultiUserLLM", "SamplingParams"]
__all__ += ["GenerationResult", "Logprob", "Piece", "Timings", "Usage"]
__all__ += ["CausalConfig", "EngineConfig", "ModelConfig"]
__all__ += ["CheckpointError", "ConfigError", "EngineClosedError", "GLMMultiUserError"]
__all__ += ["GenerationError", "InvalidParameterError", "PatchError", "PromptTooLongError"]
__all__ += [
    "QueueFullError",
    "RequestError",
    "SessionError",
    "TooManyRequestsError",
    "UserBusyError",
]

MODULES = (
    "errors",
    "model_config",
    "config",
    "structured.grammar",
    "sampling_params",
    "answer",
    "handle",
    "stats",
    "llm",
)
"""Modules of these names; `llm` imports MindSpore, and so comes last."""


def __getattr__(name: str) -> Any:
    # Imported on first use: MindSpore takes seconds to import, and the command's --help and Ctrl-C
    # handling must not wait for it.
    if name in __all__:
        for module in MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
