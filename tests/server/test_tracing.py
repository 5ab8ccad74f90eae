"""OpenTelemetry traces of requests, as received by the SDK's own exporters."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Optional

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from glm_multiuser.errors import ConfigError
from glm_multiuser.server import service as service_module
from glm_multiuser.server import spans as spans_module
from glm_multiuser.server.spans import RequestTracer
from glm_multiuser.server.tracing import open_tracer
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    HTTP,
    Wire,
    ask,
    errors_of,
    llm_that_fails,
    long_prompts,
    post,
)
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
PHASES = ["queue", "prefill", "decode"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


class Spans:
    """What a server records."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RequestTracer(provider)

    def requests(self, count: int) -> list[ReadableSpan]:
        """The spans of so many requests, as soon as they are there."""
        wait_until(lambda: len(self._roots()) == count)
        return self._roots()

    def _roots(self) -> list[ReadableSpan]:
        return [one for one in self.exporter.get_finished_spans() if one.name == "llm_request"]

    def phases(self, request: ReadableSpan) -> list[ReadableSpan]:
        """The child spans of a request, in the order of their begin."""
        children = [
            one
            for one in self.exporter.get_finished_spans()
            if one.parent is not None and one.parent.span_id == request.context.span_id
        ]
        return sorted(children, key=lambda one: (one.start_time, PHASES.index(one.name)))


@pytest.fixture(scope="module")
def recording() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def server(recording: Spans) -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_module, "open_tracer", lambda endpoint: recording.tracer)
        with in_process_server(mock_settings(users=1), llm_that_fails) as found:
            patch.undo()
            yield found


@pytest.fixture
def spans(recording: Spans) -> Spans:
    """Those of the test alone."""
    recording.exporter.clear()
    return recording


def chat(server: InProcessServer, text: str = "hello", **headers: str) -> Any:
    messages = [{"role": "user", "content": text}]
    return post(server, "/v1/chat/completions", {"messages": messages, "n": 2}, **headers)


def test_a_request_is_a_span_with_queue_prefill_and_decode(
    server: InProcessServer, spans: Spans
) -> None:
    reply = post(server, "/", {"prompt": "hello"}, x_request_id="mine")
    (request,) = spans.requests(1)
    assert request.parent is None
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    usage = {"gen_ai.usage.input_tokens": 6, "gen_ai.usage.cache_read.input_tokens": 0}
    attributes: dict[str, Any] = dict(request.attributes or {})
    assert 1 <= attributes.pop("gen_ai.usage.output_tokens") <= 64
    assert attributes == {
        **usage,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "glm_multiuser",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.response.finish_reasons": (reply.json()["finish_reason"],),
        "glm.outcome": reply.json()["finish_reason"],
    }
    queue, prefill, decode = phases = spans.phases(request)
    assert [one.name for one in phases] == PHASES
    assert {one.context.trace_id for one in phases} == {request.context.trace_id}
    assert queue.start_time == request.start_time
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    for one in phases:
        assert one.start_time is not None
        assert one.end_time is not None
        assert request.end_time is not None
        assert one.start_time <= one.end_time <= request.end_time


def test_attributes_have_the_names_of_the_conventions(
    server: InProcessServer, spans: Spans
) -> None:
    conventions = pytest.importorskip(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes"
    )
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    operations = {one.value for one in conventions.GenAiOperationNameValues}
    chat(server)
    post(server, "/v1/completions", {"prompt": [5, 6, 7]})
    rejected = post(server, "/v1/completions", {"prompt": [5] * 96})
    assert rejected.status_code == 400
    found = [dict(one.attributes or {}) for one in spans.requests(4)]
    named = {name for one in found for name in one if name.startswith("gen_ai.")}
    assert named - known == {"gen_ai.request.id"}  # vLLM's
    asked = [one["gen_ai.operation.name"] for one in found]
    assert asked == ["chat", "chat", "text_completion", "text_completion"]
    assert set(asked) <= operations
    assert {one["gen_ai.provider.name"] for one in found} == {"glm_multiuser"}


def test_the_parent_is_that_of_the_request(server: InProcessServer, spans: Spans) -> None:
    reply = chat(server, traceparent=TRACEPARENT, tracestate="vendor=value")
    requests = spans.requests(2)
    ask(server, "hello")
    alone = spans.requests(3)[-1]
    for request in requests:  # one for each of the two choices
        assert request.parent is not None
        assert (request.parent.trace_id, request.parent.span_id) == (TRACE, PARENT)
        assert request.parent.is_remote
        assert request.context.trace_id == TRACE
        assert request.context.trace_state.get("vendor") == "value"
        assert [one.name for one in spans.phases(request)] == PHASES
    tokens = [(request.attributes or {})["gen_ai.usage.output_tokens"] for request in requests]
    assert sum(map(int, tokens)) == reply.json()["usage"]["completion_tokens"]  # type: ignore
    assert alone.parent is None
    assert alone.context.trace_id != TRACE


def test_what_is_not_sampled_is_not_recorded(server: InProcessServer, spans: Spans) -> None:
    chat(server, traceparent=TRACEPARENT[:-1] + "0")
    ask(server, "hello")
    (alone,) = spans.requests(1)
    assert alone.parent is None


@pytest.mark.parametrize("wrong", ["", "00-0-0-01", "x" * 100, f"00-{0:032x}-{0:016x}-01"])
def test_a_wrong_parent_is_none(server: InProcessServer, spans: Spans, wrong: str) -> None:
    assert post(server, "/", {"prompt": "hello"}, traceparent=wrong).status_code == 200
    (request,) = spans.requests(1)
    assert request.parent is None


def outcome_of(request: ReadableSpan) -> tuple[Any, StatusCode]:
    attributes = request.attributes or {}
    assert attributes.get("error.type") in (None, attributes["glm.outcome"])
    return attributes["glm.outcome"], request.status.status_code


def test_failed_rejected_late_and_cancelled_requests_say_so(
    server: InProcessServer, spans: Spans
) -> None:
    prompt = long_prompts(1)[0]
    assert ask(server, "a" + FAILS).status_code == 500
    assert ask(server, "a" * 96).status_code == 400
    with SingleSteps() as steps:
        leaver = Wire(server.url).request("/", {"prompt": prompt}, traceparent=TRACEPARENT)
        server.wait_until_running(1)
        late = Wire(server.url).request("/", {"prompt": prompt}, x_request_timeout="0.01")
        server.wait_until_running(2)
        leaver.close()
        server.wait_until_running(1)
        wait_until(lambda: None not in errors_of(server))
        steps.step()
        late.read_until(b"deadline_exceeded")
        late.close()
    failed, rejected, cancelled, expired = requests = spans.requests(4)
    assert [outcome_of(one) for one in requests] == [
        ("error", StatusCode.ERROR),
        ("context_length_exceeded", StatusCode.ERROR),
        ("cancelled", StatusCode.UNSET),
        ("deadline_exceeded", StatusCode.ERROR),
    ]
    assert [one.name for one in spans.phases(failed)] == PHASES
    assert [one.name for one in spans.phases(expired)] == ["queue"]
    assert spans.phases(rejected) == spans.phases(cancelled) == []
    assert cancelled.context.trace_id == TRACE
    assert prompt not in str([one.to_json() for one in requests])


class Collector(HTTPServer):
    """Takes traces over OTLP/HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collecting)
        self.paths: list[str] = []
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Collecting(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Not on the terminal."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(("by_option", "named"), [(True, "mine"), (False, None)])
def test_a_collector_gets_what_was_recorded_before_the_end(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    by_option: bool,
    named: Optional[str],
) -> None:
    option: dict[str, Any] = {}
    if by_option:
        option["otlp_endpoint"] = collector.url
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    if named:
        monkeypatch.setenv("OTEL_SERVICE_NAME", named)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE))
    monkeypatch.setattr(spans_module, "FLUSH_SECONDS", PATIENCE)
    with in_process_server(mock_settings(**option)) as sending:
        post(sending, "/", {"prompt": "hello"}, traceparent=TRACEPARENT)
    assert set(collector.paths) == {"/v1/traces"}
    found = [one for request in collector.received for one in request.resource_spans]
    resources = [
        {one.key: one.value.string_value for one in each.resource.attributes} for each in found
    ]
    assert {one["service.name"] for one in resources} == {named or "glm_multiuser"}
    sent = [span for each in found for scope in each.scope_spans for span in scope.spans]
    assert sorted(one.name for one in sent) == sorted(["llm_request", *PHASES])
    assert {one.trace_id for one in sent} == {TRACE.to_bytes(16, "big")}


def test_without_an_endpoint_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer() is None
    with in_process_server() as plain:
        assert plain.service.tracer is None
        assert post(plain, "/", {"prompt": "a"}, traceparent=TRACEPARENT).status_code == 200
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert open_tracer() is None
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracer("http://127.0.0.1:1") is None


def test_without_an_endpoint_the_sdk_is_not_imported() -> None:
    program = (
        "import sys; from glm_multiuser.server import app, tracing; tracing.open_tracer();"
        "print([one for one in sys.modules if one.startswith('opentelemetry.sdk')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is 'zipkin'; it must be 'otlp'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; only"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "TRACES_PROTOCOL is 'http/json'; only"),
        (
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
            "99999",
            "rejects an OTEL_. variable: max_export_batch_size must be",
        ),
        (
            "OTEL_ATTRIBUTE_COUNT_LIMIT",
            "few",
            "rejects an OTEL_. variable: OTEL_ATTRIBUTE_COUNT_LIMIT must be .* but got few",
        ),
    ],
)
def test_what_is_not_supported_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        open_tracer()


def test_an_endpoint_that_is_none_is_said() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint is 'localhost:4318'; it must begin"):
        open_tracer("localhost:4318")


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "glm_multiuser.server.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'glm-multiuser\[otel\]'"):
        open_tracer("http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["console", "otlp"])
def test_the_command_serves_with_traces(exporter: str) -> None:
    """protobuf is imported before MindSpore then."""
    wanted = {"OTEL_TRACES_EXPORTER": exporter, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with ServerProcess(environment=wanted) as process:
        answer = HTTP.post(process.url, json={"prompt": "hi", "max_tokens": 1})
    assert answer.status_code == 200
