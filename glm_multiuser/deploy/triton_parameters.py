"""Engine settings of a Triton model: the `parameters` of its `config.pbtxt`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.bodies import problem_of
from glm_multiuser.settings import settings_of


def parameters_model() -> type[BaseModel]:
    """Builds the schema of `parameters`: `checkpoint`, and the engine settings."""
    settings: dict[str, Any] = {
        one.name: (one.type, one.default) for one in settings_of(EngineConfig)
    }
    config = ConfigDict(extra="forbid")
    return create_model("ModelParameters", __config__=config, checkpoint=(Path, ...), **settings)


def engine_arguments(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the arguments of `MultiUserLLM.from_pretrained`.

    Args:
        parameters: of the model's configuration, {name: {"string_value": text}}.
        folder: of the model; a relative checkpoint is relative to it.

    Raises:
        ConfigError: an unknown, missing or invalid parameter.
    """
    texts = {name: value["string_value"].strip() for name, value in parameters.items()}
    # Names in capitals belong to Triton's Python backend.
    given = {name: text for name, text in texts.items() if text and not name.isupper()}
    try:
        parsed = parameters_model().model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(problem_of(first, ("parameters", *first["loc"]))[1]) from None
    arguments = parsed.model_dump(exclude_unset=True)
    checkpoint = folder / arguments.pop("checkpoint")
    try:
        os.fsencode(checkpoint)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"parameters.checkpoint is {str(checkpoint)!a}; the Python inside Triton has file "
            f"names in {error.encoding} only"
        ) from None
    return {**arguments, "folder": checkpoint}
