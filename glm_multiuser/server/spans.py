"""A span per request, with child spans for queue, prefill and decode. Needs the extra `otel`."""

from __future__ import annotations

import threading
import time
from typing import Any, Optional

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from glm_multiuser.answer import GenerationResult, Timings
from glm_multiuser.server.generation import Generation, OnEnd
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.logs import request_id
from glm_multiuser.version import NAME, own_version

FLUSH_SECONDS = 5.0
"""For spans that are still being sent at shutdown."""
NO_ERROR = ("stop", "length", "cancelled")
"""Outcomes that are not errors; a client that disconnects cancels its request."""


def provider_for(exporter: str, endpoint: Optional[str]) -> TracerProvider:
    """Creates a provider that samples and exports as configured by the `OTEL_*` variables.

    Args:
        exporter: "otlp" or "console".
        endpoint: base URL of an OTLP/HTTP collector; overrides the variables.
    """
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: NAME}))
    provider = TracerProvider(resource=resource)
    to: SpanExporter = ConsoleSpanExporter()
    if exporter == "otlp":
        to = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    provider.add_span_processor(BatchSpanProcessor(to))
    return provider


class RequestTracer:
    """Records the spans of requests.

    Args:
        provider: of OpenTelemetry's SDK.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(NAME, own_version())

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Wraps `app`, so that requests join the trace of their header `traceparent`."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            token = context.attach(propagate.extract(headers, Context()))
            try:
                await app(scope, receive, send)
            finally:
                context.detach(token)

        return traced

    def watch(self, model: str, request: GenerationRequest, since: float, on_end: OnEnd) -> OnEnd:
        """Wraps `on_end`, to record the request that the current task starts.

        Args:
            model: name of the model.
            request: the request.
            since: time of submission, in `time.monotonic` seconds.
            on_end: called at its end.
        """
        parent, identifier = context.get_current(), request_id.get()

        def record(generation: Generation, outcome: str) -> None:
            on_end(generation, outcome)
            attributes = _attributes(model, request, identifier, outcome, generation.result)
            self._record(parent, attributes, since, outcome, generation.result)

        return record

    def rejected(self, model: str, request: GenerationRequest, code: str) -> None:
        """Records that the request of the current task was rejected."""
        attributes = _attributes(model, request, request_id.get(), code, None)
        self._record(context.get_current(), attributes, time.monotonic(), code)

    def close(self) -> None:
        """Exports recorded spans; gives up after `FLUSH_SECONDS`."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)

    def _record(
        self,
        parent: Context,
        attributes: dict[str, Any],
        since: float,
        outcome: str,
        result: Optional[GenerationResult] = None,
    ) -> None:
        ended = time.time_ns()
        started = ended - int((time.monotonic() - since) * 1e9)
        request = self._tracer.start_span(
            "llm_request",
            parent,
            SpanKind.SERVER,
            attributes,
            start_time=started,
        )
        if outcome not in NO_ERROR:
            request.set_status(Status(StatusCode.ERROR, outcome))
        if result is not None:
            inside = trace.set_span_in_context(request, parent)
            for name, begin, end in _phases(result.timings):
                child = self._tracer.start_span(name, inside, start_time=started + int(begin * 1e9))
                child.end(started + int(end * 1e9))
        request.end(ended)


def _attributes(
    model: str,
    request: GenerationRequest,
    identifier: Optional[str],
    outcome: str,
    result: Optional[GenerationResult],
) -> dict[str, Any]:
    """Span attributes, named as in OpenTelemetry's GenAI semantic conventions where they exist."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if request.is_text else "text_completion",
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": model,
        "glm.outcome": outcome,
    }
    if identifier is not None:
        found["gen_ai.request.id"] = identifier
    if outcome not in NO_ERROR:
        found["error.type"] = outcome
    if result is not None:
        found["gen_ai.response.finish_reasons"] = (result.finish_reason,)
        found["gen_ai.usage.input_tokens"] = result.usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = result.usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = result.usage.cached_tokens
    return found


def _phases(timings: Timings) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase that the request reached, in seconds since submission."""
    queued, first, total = timings.queued_s, timings.ttft_s, timings.total_s
    phases = [("queue", 0.0, queued)]
    if queued < total:
        phases.append(("prefill", queued, total if first is None else first))
    if first is not None:
        phases.append(("decode", first, total))
    return phases
