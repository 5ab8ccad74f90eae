"""What a configuration file for Ray Serve may say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.keys import read_keys
from glm_multiuser.server.settings import Limits, ModelSettings, ServerSettings, parse_place


@dataclass(frozen=True)
class Scale:
    """How many replicas there are.

    Attributes:
        replicas: that there are; with `max_replicas`, at least.
        max_replicas: that there may be when there is much to do; None: no autoscaling.
        cpus: that each one takes of what its node has.
        busy: mean number of requests in a replica, as a part of its slots, that is aimed at.
        upscale_delay_seconds, downscale_delay_seconds: for which more, or less, must be wanted.

    Raises:
        ConfigError: a number out of its range.
    """

    replicas: int = 1
    max_replicas: Optional[int] = None
    cpus: float = 1.0
    busy: float = 0.8
    upscale_delay_seconds: float = 30.0
    downscale_delay_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; it must be at least replicas, which is "
                f"{self.replicas}"
            )
        for name in ("cpus", "busy", "upscale_delay_seconds", "downscale_delay_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}; it must be more than 0")


class Arguments(BaseModel):
    """The `args` of an application; names and meanings as of `glm-multiuser serve`.

    generation: means nothing; Ray replaces the replicas when an argument changes, so a new number
        brings in new weights from the same folder.
    """

    model_config = ConfigDict(extra="forbid")

    checkpoint: Union[str, list[str]]
    available: list[str] = []
    users: int = Field(8, ge=1)
    seq_length: int = Field(512, ge=1)
    max_queue: int = Field(64, ge=0)
    prefill_chunk: Optional[int] = None
    cache_prompt: bool = True
    device_target: Literal["CPU", "Ascend"] = "CPU"
    kernels: str = "auto"
    weight_dtype: Optional[str] = None
    warm_up: Optional[list[str]] = None
    api_keys: Optional[Path] = None
    cors_origins: list[str] = []
    drain_seconds: float = 30.0
    memory_gib: Optional[float] = Field(None, gt=0)
    log_prompts: bool = False
    limits: dict[str, float] = {}
    replicas: int = 1
    max_replicas: Optional[int] = None
    cpus: float = 1.0
    busy: float = 0.8
    upscale_delay_seconds: float = 30.0
    downscale_delay_seconds: float = 600.0
    generation: int = 0

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Arguments:
        """Checks what a file says.

        Raises:
            ConfigError: names the argument that is wrong.
        """
        try:
            return cls.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"args: {name}: {first['msg']}") from None

    def settings(self) -> ServerSettings:
        """Of every replica.

        Raises:
            ConfigError: a number out of its range, or keys that cannot be read.
        """
        loaded = [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint
        unknown = sorted(set(self.limits) - set(Limits.__dataclass_fields__))
        if unknown:
            known = ", ".join(Limits.__dataclass_fields__)
            raise ConfigError(f"args: limits has {unknown[0]!r}; there are {known}")
        whole = {name: value for name, value in vars(Limits()).items() if isinstance(value, int)}
        limits = {
            name: int(value) if name in whole else value for name, value in self.limits.items()
        }
        return ServerSettings(
            models=tuple(
                self._model(place, load)
                for places, load in ((loaded, True), (self.available, False))
                for place in places
            ),
            limits=Limits(**limits),  # type: ignore[arg-type]
            keys=read_keys(self.api_keys),
            drain_seconds=self.drain_seconds,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            cors_origins=tuple(self.cors_origins),
            log_prompts=self.log_prompts,
            device_target=self.device_target,
            kernels=self.kernels,
            weight_dtype=self.weight_dtype,
            **({} if self.warm_up is None else {"warm_up": tuple(self.warm_up)}),  # type: ignore[arg-type]
        )

    def scale(self) -> Scale:
        """How many replicas.

        Raises:
            ConfigError: a number out of its range.
        """
        return Scale(**{name: getattr(self, name) for name in Scale.__dataclass_fields__})

    def _model(self, place: str, load: bool) -> ModelSettings:
        name, folder = parse_place(place)
        return ModelSettings(
            name,
            folder,
            self.users,
            self.seq_length,
            self.max_queue,
            self.prefill_chunk,
            self.cache_prompt,
            load,
        )
