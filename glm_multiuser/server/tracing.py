"""Configures OpenTelemetry traces from the option and the `OTEL_*` variables.

OpenTelemetry's SDK, the extra `otel`, is imported only if traces are enabled.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Optional

from glm_multiuser.errors import ConfigError

if TYPE_CHECKING:
    from glm_multiuser.server.spans import RequestTracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER = "OTEL_TRACES_EXPORTER"
DISABLED = "OTEL_SDK_DISABLED"
BEFORE_MINDSPORE = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
"""Variables required to import MindSpore after protobuf; MindSpore itself sets them too late."""


def open_tracer(endpoint: Optional[str] = None) -> Optional[RequestTracer]:
    """Creates the tracer; None unless the option or a variable enables traces.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318; None: as
            configured by the `OTEL_*` variables.

    Raises:
        ConfigError: the extra is not installed, an endpoint, exporter or protocol is not
            supported, or OpenTelemetry rejects another variable.
    """
    exporter = os.environ.get(EXPORTER) or ("otlp" if _first_of(ENDPOINTS) else "none")
    if endpoint is not None:
        exporter = "otlp"
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {endpoint!r}; it must begin with http:// or https://"
            )
    if exporter == "none" or os.environ.get(DISABLED, "").lower() == "true":
        return None
    if exporter not in ("otlp", "console"):
        raise ConfigError(f"{EXPORTER} is {exporter!r}; it must be 'otlp', 'console' or 'none'")
    protocol = _first_of(PROTOCOLS) or "http/protobuf"
    if exporter == "otlp" and protocol != "http/protobuf":
        name = next(name for name in PROTOCOLS if os.environ.get(name))
        raise ConfigError(f"{name} is {protocol!r}; only 'http/protobuf' is supported")
    for name, value in BEFORE_MINDSPORE.items():
        os.environ.setdefault(name, value)
    try:
        from glm_multiuser.server.spans import RequestTracer, provider_for

        return RequestTracer(provider_for(exporter, endpoint))
    except ImportError as error:
        raise ConfigError(
            f"traces need {error.name}; install it with pip install 'glm-multiuser[otel]'"
        ) from error
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry rejects an OTEL_* variable: {error}") from error


def _first_of(names: tuple[str, ...]) -> Optional[str]:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
