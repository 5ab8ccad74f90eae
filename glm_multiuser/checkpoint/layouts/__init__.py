"""The published layouts of checkpoints: one module each, and which one a checkpoint has.

A layout is a module with what `Layout` says. Where a family is published in several of them, they
fill the same parameters, and the names in the weight files tell which one it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable, Protocol

from glm_multiuser.checkpoint.layouts import chatglm, chatglm_6b, glm, qwen2
from glm_multiuser.checkpoint.placement import Places
from glm_multiuser.config import AnyModelConfig
from glm_multiuser.errors import CheckpointError, ConfigError


class Layout(Protocol):
    """What each module of this package offers; the configurations are those it returns itself."""

    def read_config(self, values: Mapping[str, Any]) -> Any:
        """The model that a parsed `config.json` describes; raises ConfigError."""

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Our parameter's name -> its shape, for every weight of the model."""

    def placements(self, config: Any) -> Places:
        """Name in the checkpoint -> its place, for every weight of the model."""


OF_MODEL_TYPE: dict[str, Layout] = {"chatglm": chatglm, "glm": glm, "qwen2": qwen2}

OF_ARCHITECTURE: dict[str, Layout] = {
    "ChatGLMModel": chatglm,
    "ChatGLMForConditionalGeneration": chatglm,
    "GlmForCausalLM": glm,
    "Qwen2ForCausalLM": qwen2,
}

OF_FAMILY: dict[str, tuple[Layout, ...]] = {
    "chatglm-6b": (chatglm_6b,),
    "chatglm": (chatglm, glm),
    "qwen2": (qwen2,),
}

MINDFORMERS: dict[str, Callable[[Any], Places]] = {
    "chatglm-6b": chatglm_6b.mindformers_placements,
    "chatglm": chatglm.mindformers_placements,
}
"""Family -> placements of its `.ckpt` files."""


def layout_of_config(values: Mapping[str, Any]) -> Layout:
    """The layout that a parsed `config.json` announces.

    Raises:
        ConfigError: none of those that can be read.
    """
    # ChatGLM2 and later kept the model_type of ChatGLM-6B, but not its positions.
    if values.get("position_encoding_2d") and values.get("model_type", "chatglm") == "chatglm":
        return chatglm_6b
    model_type, architectures = values.get("model_type"), values.get("architectures")
    if isinstance(model_type, str) and model_type in OF_MODEL_TYPE:
        return OF_MODEL_TYPE[model_type]
    names = architectures if isinstance(architectures, list) else []
    known = [OF_ARCHITECTURE[one] for one in names if one in OF_ARCHITECTURE]
    if model_type is None and known:
        return known[0]
    raise ConfigError(
        f"model_type {model_type!r} with architectures {architectures!r} is not a model that can "
        f"be read; those are {', '.join(map(repr, OF_MODEL_TYPE))} (ChatGLM-6B, ChatGLM2, "
        "ChatGLM3, GLM-4, Qwen2)"
    )


def placements_of_names(config: AnyModelConfig, names: Iterable[str]) -> Places:
    """The placements of the family's layout that some of these names are from, or of its first."""
    names = list(names)
    all_places = [layout.placements(config) for layout in OF_FAMILY[config.family]]
    for places in all_places:
        if any(name in places for name in names):
            return places
    return all_places[0]


def mindformers_placements(config: AnyModelConfig) -> Places:
    """The placements of MindFormers' `.ckpt` files.

    Raises:
        CheckpointError: MindFormers' layout of this family is not known here.
    """
    if config.family not in MINDFORMERS:
        raise CheckpointError(
            f"family {config.family!r} has no .ckpt layout of MindFormers that can be read or "
            f"written; those are of {', '.join(map(repr, MINDFORMERS))}"
        )
    return MINDFORMERS[config.family](config)


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameter's name -> its shape, for every weight of the model."""
    return OF_FAMILY[config.family][0].shapes(config)
