"""How the engine behind a Triton model is set up: the `parameters` of its `config.pbtxt`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from pydantic import BaseModel, ConfigDict, ValidationError

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.bodies import problem_of


class ModelParameters(BaseModel):
    """Arguments of `MultiUserLLM.from_pretrained`; None: its own default."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Path
    users: Optional[int] = None
    seq_length: Optional[int] = None
    max_queue: Optional[int] = None
    prefill_chunk: Optional[int] = None
    cache_prompt: Optional[bool] = None
    device_target: Optional[str] = None
    device_id: Optional[int] = None
    kernels: Optional[str] = None
    weight_dtype: Optional[str] = None


def engine_arguments(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What `MultiUserLLM.from_pretrained` is called with.

    Args:
        parameters: of the model's configuration, {name: {"string_value": text}}.
        folder: of the model; a relative checkpoint is seen from there.

    Raises:
        ConfigError: a parameter that is unknown, missing, or of another type.
    """
    texts = {name: value["string_value"].strip() for name, value in parameters.items()}
    # Names in capitals belong to Triton's Python backend.
    given = {name: text for name, text in texts.items() if text and not name.isupper()}
    try:
        parsed = ModelParameters.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(problem_of(first, ("parameters", *first["loc"]))[1]) from None
    arguments = parsed.model_dump(exclude_none=True)
    checkpoint = folder / arguments.pop("checkpoint")
    try:
        os.fsencode(checkpoint)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"parameters.checkpoint is {str(checkpoint)!a}; the Python inside Triton has file "
            f"names in {error.encoding} only"
        ) from None
    return {**arguments, "folder": checkpoint}
