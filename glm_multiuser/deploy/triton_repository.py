"""Our Triton model repository: its location, and copies with other parameters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from glm_multiuser import package_data

REPOSITORY = package_data.ROOT / package_data.TRITON_REPOSITORY
MODELS = ("chatglm", "chatglm_stream")


def write_repository(folder: Path, parameters: Mapping[str, object]) -> None:
    """Copies the repository and sets the parameters of its models.

    Args:
        folder: created by this call.
        parameters: {name: value}; None is written as an empty text.
    """
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for model in MODELS:
        path = folder / model / "config.pbtxt"
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
        for name, value in parameters.items():
            config.parameters[name].string_value = "" if value is None else str(value)
        path.write_text(text_format.MessageToString(config, as_utf8=True), encoding="utf-8")
