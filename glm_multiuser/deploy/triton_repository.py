"""Our Triton model repository: where it is, and a copy of it with other parameters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from glm_multiuser.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
REPOSITORY = Path("deploy/model_repository")
MODELS = ("chatglm", "chatglm_stream")


def find_repository() -> Path:
    """The repository as it is in the checkout.

    Raises:
        ConfigError: the package was installed without it.
    """
    folder = CHECKOUT / REPOSITORY
    if not all((folder / model / "config.pbtxt").is_file() for model in MODELS):
        raise ConfigError(
            f"no Triton model repository at {folder}; it is a part of the checkout, not of the "
            "package: install that with pip install -e '.[triton]'"
        )
    return folder


def write_repository(folder: Path, parameters: Mapping[str, object]) -> None:
    """A copy of the repository whose models have these parameters (None: left empty).

    Args:
        folder: that is made.
        parameters: {name: value}.

    Raises:
        ConfigError: as `find_repository`.
    """
    shutil.copytree(find_repository(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    for model in MODELS:
        path = folder / model / "config.pbtxt"
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
        for name, value in parameters.items():
            config.parameters[name].string_value = "" if value is None else str(value)
        path.write_text(text_format.MessageToString(config, as_utf8=True), encoding="utf-8")
