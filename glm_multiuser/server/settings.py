"""Settings of a server; the defaults are safe."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError
from glm_multiuser.settings import check, setting

ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
"""What browsers send; any other text would equal no `Origin`."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
DRAIN_SECONDS_MAX = 86_400
"""One day; threads can wait for `threading.TIMEOUT_MAX` at most."""


@dataclass(frozen=True)
class ModelSettings:
    """A checkpoint to serve, and the settings of its engine.

    Attributes:
        name: the model name in requests.
        folder: the checkpoint.
        engine: its settings.
        load: whether it is loaded at startup; otherwise on a client's request.

    Raises:
        ConfigError: the name cannot be part of a URL.
    """

    name: str
    folder: Path
    engine: EngineConfig = field(default_factory=EngineConfig)
    load: bool = True

    def __post_init__(self) -> None:
        if not MODEL_NAME.fullmatch(self.name):
            raise ConfigError(
                f"model name is {self.name!r}; it must be 1 to 64 letters, digits, '.', '_' or "
                "'-', the first a letter or digit"
            )


@dataclass(frozen=True)
class Limits:
    """Limits on clients' requests.

    Raises:
        ConfigError: a field is out of range.
    """

    body_bytes: int = setting(
        1 << 20, "Maximum bytes of a request body", above=0, option="--max-body"
    )
    body_seconds: float = setting(30.0, "Timeout for receiving a request body, in seconds", above=0)
    request_seconds: float = setting(
        600.0,
        "Request timeout in seconds; a request can set a shorter one",
        above=0,
        option="--request-timeout",
    )
    requests_per_user: int = setting(4, "Concurrent requests per session", above=0)
    requests_per_key: int = setting(256, "Concurrent requests per API key", above=0)
    choices: int = setting(8, "Answers per request, over all prompts", above=0)
    step_entries: int = setting(256, "Generations kept by the step API", above=0)
    step_seconds: float = setting(
        60.0,
        "Seconds without a poll after which the step API cancels a generation",
        above=0,
        option="--step-expiry",
    )
    response_bytes: int = setting(
        64 << 20,
        "Bytes of stored /v1/responses, shared by all API keys",
        above=0,
        option="--response-store",
    )

    def __post_init__(self) -> None:
        check(self)


def most_answers(limits: Limits, engine: EngineConfig) -> int:
    """Maximum prompts and answers per request; even an idle server would reject more."""
    return min(limits.choices, limits.requests_per_key, engine.users + engine.max_queue)


@dataclass(frozen=True)
class ServerSettings:
    """All settings of a server except its address.

    Attributes:
        models: the first one is the default for requests without a model.
        limits: on clients' requests.
        keys: name of an API key -> the key; empty: no authentication.
        admins: names of the keys with the role admin.
        warm_up: prompts that every model answers before it is ready.

    Raises:
        ConfigError: a field is out of range, there is no model, two have the same name, or
            `model_control` needs a role that no key has.
    """

    models: tuple[ModelSettings, ...]
    limits: Limits = field(default_factory=Limits)
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    admins: frozenset[str] = frozenset()
    warm_up: tuple[str, ...] = ("你好", "Who are you?")
    drain_seconds: float = setting(
        30.0,
        "Seconds for running requests to finish on shutdown",
        low=0,
        high=DRAIN_SECONDS_MAX,
        option="--drain",
    )
    memory_gib: Optional[float] = setting(
        None,
        "GiB for weights and caches of all models; default: no limit",
        above=0,
        option="--memory-budget",
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Allow cross-origin requests from this origin", option="--cors-origin"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Accept this host name besides localhost, this machine's names and any IP address",
        option="--allowed-host",
    )
    tls_cert: Optional[str] = setting(None, "PEM file with the certificate chain; enables HTTPS")
    tls_key: Optional[str] = setting(None, "PEM file with the private key")
    root_path: str = setting("", "Path prefix of this server behind a reverse proxy, e.g. /glm")
    forwarded_allow_ips: str = setting(
        "",
        "Comma-separated proxy addresses or networks to trust X-Forwarded-For and "
        "X-Forwarded-Proto from; default: none",
    )
    log_prompts: bool = setting(False, "Log prompts and completions")
    otlp_endpoint: Optional[str] = setting(
        None,
        "Send OpenTelemetry traces to this OTLP/HTTP collector, e.g. http://127.0.0.1:4318; "
        "default: from the OTEL_* environment variables",
    )
    model_control: Optional[str] = setting(
        None,
        "Who may load and unload models: none, keys (role admin) or all; default: all on a "
        "loopback address without API keys or proxy, else none",
        choices=("none", "keys", "all"),
    )

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ConfigError("models is empty; a server needs at least one checkpoint")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"models has {', '.join(twice)} twice; names must be unique")
        check(self)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}; an origin is scheme://host or "
                    "scheme://host:port as browsers send it, in lower-case ASCII, without a "
                    "default port, a wildcard and a path, or * for every one"
                )
        for host in self.allowed_hosts:
            if not HOST_NAME.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}; it must be a host name, without scheme and port"
                )
        if not ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path is {self.root_path!r}; it must be a path as /glm, without a slash at "
                "its end"
            )
        every = self.forwarded_allow_ips == "*"  # uvicorn ignores it in a list
        for proxy in filter(None, () if every else self.forwarded_allow_ips.split(",")):
            if not _is_network(proxy.strip()):
                raise ConfigError(
                    f"forwarded_allow_ips has {proxy!r}; it must be '*', or addresses and networks"
                )
        if self.model_control == "keys" and not self.admins:
            raise ConfigError("model_control is 'keys'; of the API keys none has the role admin")

    def at(self, address: str) -> ServerSettings:
        """Returns the settings with the defaults for a server that listens on this IP address."""
        if self.model_control is not None:
            return self
        local = ipaddress.ip_address(address).is_loopback
        # A local proxy connects from a loopback address, but its clients may be anywhere.
        proxied = self.root_path or self.forwarded_allow_ips
        unguarded = local and not self.keys and not proxied
        return replace(self, model_control="all" if unguarded else "none")

    @property
    def scheme(self) -> str:
        """URL scheme."""
        return "http" if self.tls_cert is None else "https"


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def model_settings(places: Iterable[str], engine: EngineConfig, load: bool) -> list[ModelSettings]:
    """Parses NAME=FOLDER; without NAME, the folder's or GGUF file's own name is the model's.

    Raises:
        ConfigError: a name cannot be part of a URL, or nothing follows it.
    """
    found = []
    for place in places:
        name, equals, folder = place.partition("=")
        if equals and not folder:
            raise ConfigError(f"checkpoint is {place!r}; it must be NAME=FOLDER or FOLDER")
        path = Path(folder if equals else place)
        name = name if equals else path.resolve().name.removesuffix(".gguf")
        found.append(ModelSettings(name, path, engine, load))
    return found
