"""What a server may be told, with defaults that are safe to leave alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import ConfigError

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ModelSettings:
    """A checkpoint that can be served, and how its engine is set up.

    Attributes:
        name: by which clients ask for it.
        folder: the checkpoint.
        users: slots.
        seq_length: tokens that each user can hold.
        max_queue: requests that may wait for a slot.
        prefill_chunk, cache_prompt: as in `EngineConfig`.
        load: whether it is loaded at the start; otherwise when somebody asks for it.

    Raises:
        ConfigError: a name that cannot stand in a URL.
    """

    name: str
    folder: Path
    users: int = 8
    seq_length: int = 512
    max_queue: int = 64
    prefill_chunk: Optional[int] = None
    cache_prompt: bool = True
    load: bool = True

    def __post_init__(self) -> None:
        if not MODEL_NAME.fullmatch(self.name):
            raise ConfigError(
                f"model name is {self.name!r}; it must be 1 to 64 letters, digits, '.', '_' or "
                "'-', the first a letter or digit"
            )


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the server.

    Attributes:
        body_bytes: of a request; more is refused before it is parsed.
        body_seconds: in which a request must have arrived as a whole.
        request_seconds: after which a request ends with an error, unless it asked for less.
        requests_per_user: at the same time, of one session.
        requests_per_key: at the same time, of one API key with all its sessions.
        choices: answers to one prompt (`n`), and prompts in one request.
        step_entries: generations that the step API keeps for clients that come back.
        step_seconds: after which one that nobody asks for is given up.
    """

    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    requests_per_user: int = 4
    requests_per_key: int = 256
    choices: int = 8
    step_entries: int = 256
    step_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be more than 0")


@dataclass(frozen=True)
class ServerSettings:
    """Everything about a server but its address.

    Attributes:
        models: the first one answers requests that name none.
        limits: of one client.
        keys: name of an API key -> the key; empty: everybody may ask.
        warm_up: prompts that every model answers before it is ready.
        drain_seconds: that running requests get when the server is told to end.
        memory_bytes: that all models together may take; None: no limit.
        cors_origins: other origins whose pages may read answers.
        log_prompts: whether prompts and answers may stand in the log.
        device_target, device_id, kernels, weight_dtype: as in `EngineConfig`.

    Raises:
        ConfigError: no model, or two with one name.
    """

    models: tuple[ModelSettings, ...]
    limits: Limits = field(default_factory=Limits)
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    warm_up: tuple[str, ...] = ("你好", "Who are you?")
    drain_seconds: float = 30.0
    memory_bytes: Optional[int] = None
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    device_target: str = "CPU"
    device_id: int = 0
    kernels: str = "auto"
    weight_dtype: Optional[str] = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ConfigError("models is empty; a server needs at least one checkpoint")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"models has {', '.join(twice)} twice; every name must be its own")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be at least 0")


def parse_place(place: str) -> tuple[str, Path]:
    """NAME=FOLDER, or a folder whose own name is the model's."""
    name, equals, folder = place.partition("=")
    if equals:
        return name, Path(folder)
    return Path(place).resolve().name, Path(place)
