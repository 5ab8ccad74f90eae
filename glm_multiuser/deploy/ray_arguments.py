"""Arguments of a Ray Serve configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.bodies import problem_of
from glm_multiuser.server.keys import read_keys
from glm_multiuser.server.settings import Limits, ServerSettings, model_settings
from glm_multiuser.settings import check, pick, setting, settings_of


@dataclass(frozen=True)
class Scale:
    """Number of replicas, their resources, and autoscaling.

    Raises:
        ConfigError: a field out of its range.
    """

    replicas: int = setting(1, "Number of replicas; with max_replicas, the minimum", low=1)
    max_replicas: Optional[int] = setting(
        None, "Maximum number of replicas; default: no autoscaling", low=1
    )
    cpus: float = setting(1.0, "CPUs that Ray reserves for a replica", above=0)
    busy: float = setting(
        0.8, "Autoscaling target: ongoing requests per slot of a replica", above=0
    )
    upscale_delay_seconds: float = setting(
        30.0, "Seconds of higher load before replicas are added", above=0
    )
    downscale_delay_seconds: float = setting(
        600.0, "Seconds of lower load before replicas are removed", above=0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; it must be at least replicas, which is "
                f"{self.replicas}"
            )


# YAML has a size in bytes as a number.
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
WITHOUT = {
    "device_id": "Ray gives each one a device",
    **dict.fromkeys(
        ("tls_cert", "tls_key", "root_path", "forwarded_allow_ips"),
        "Ray's proxy receives the requests",
    ),
}
"""Settings that an application does not accept, and why."""


def arguments_model() -> type[BaseModel]:
    """Builds the schema of an application's `args`, with a field for each setting.

    `generation` has no meaning of its own: Ray replaces the replicas when an argument changes, so a
    new number loads new weights from the same folder.
    """
    limits = create_model("Limits", __config__=STRICT, **_fields(Limits))
    return create_model(
        "Arguments",
        __config__=STRICT,
        checkpoint=(Union[str, list[str]], ...),
        available=(list[str], []),
        api_keys=(Optional[Path], None),
        warm_up=(Optional[tuple[str, ...]], None),
        limits=(limits, limits()),
        generation=(int, 0),
        **_fields(EngineConfig),
        **_fields(ServerSettings),
        **_fields(Scale),
    )


def read_arguments(arguments: Mapping[str, Any]) -> tuple[ServerSettings, Scale]:
    """Parses `args` into the settings of every replica and the scale of the deployment.

    Raises:
        ConfigError: an unknown, missing or out-of-range argument, or invalid API keys.
    """
    try:
        given = vars(arguments_model().model_validate(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"args: {problem_of(first, first['loc'])[1]}") from None
    places = given["checkpoint"]
    engine = EngineConfig(**pick(EngineConfig, given))
    server = pick(ServerSettings, given)
    if given["warm_up"] is not None:
        server["warm_up"] = given["warm_up"]
    settings = ServerSettings(
        (
            *model_settings([places] if isinstance(places, str) else places, engine, load=True),
            *model_settings(given["available"], engine, load=False),
        ),
        Limits(**vars(given["limits"])),
        *read_keys(given["api_keys"]),
        **server,
    )
    return settings, Scale(**pick(Scale, given))


def _fields(declared: type) -> dict[str, Any]:
    settings = [one for one in settings_of(declared) if one.name not in WITHOUT]
    return {one.name: (one.type, one.default) for one in settings}
