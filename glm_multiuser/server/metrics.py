"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Callable, Optional

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from glm_multiuser.answer import GenerationResult

if TYPE_CHECKING:
    from glm_multiuser.engine.step_loop import StepReport
    from glm_multiuser.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)

GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("users", "Slots.", lambda stats: stats.users),
    ("active_users", "Slots with a running request.", lambda stats: stats.active_users),
    ("idle_users", "Slots kept for an idle user.", lambda stats: stats.idle_users),
    ("queue_depth", "Requests waiting for a slot.", lambda stats: stats.waiting),
    (
        "compiles_after_ready",
        "Graphs compiled after the model was ready; must be 0.",
        lambda stats: stats.compiles_after_ready,
    ),
    ("sessions_in_memory", "Sessions in memory.", lambda stats: stats.sessions.in_memory),
    ("session_memory_bytes", "Memory of sessions.", lambda stats: stats.sessions.memory_bytes),
    ("sessions_on_disk", "Session files.", lambda stats: stats.sessions.on_disk),
    ("session_disk_bytes", "Bytes of session files.", lambda stats: stats.sessions.disk_bytes),
)
CACHE_BYTES: tuple[tuple[str, Callable[[EngineStats], float]], ...] = (
    ("reserved", lambda stats: stats.cache_reserved_bytes),
    ("resident", lambda stats: stats.cache_resident_bytes),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed.", lambda stats: stats.prompt_tokens),
    ("generated_tokens", "Tokens generated.", lambda stats: stats.tokens_generated),
    ("sessions_saved", "Sessions copied out of a slot.", lambda stats: stats.sessions.saved),
    (
        "sessions_restored",
        "Sessions copied into a slot.",
        lambda stats: stats.sessions.restored,
    ),
    (
        "session_restored_tokens",
        "Prompt tokens restored instead of computed.",
        lambda stats: stats.sessions.restored_tokens,
    ),
    ("steps", "Steps: prefill, decode, or both.", lambda stats: stats.steps),
)


class Metrics:
    """Counters and histograms of one server, in a registry of its own.

    Args:
        stats: returns name -> engine statistics of all models that are ready.
    """

    def __init__(self, stats: Callable[[], dict[str, EngineStats]]) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # memory, CPU time, file descriptors
        self.requests = Counter(
            "glm_requests",
            "Requests by outcome.",
            ("model", "outcome"),
            registry=self.registry,
        )
        self.http_responses = Counter(
            "glm_http_responses", "Responses by status.", ("status",), registry=self.registry
        )
        self.step_entries = Gauge(
            "glm_step_entries",
            "Generations kept by the step API.",
            registry=self.registry,
        )
        self.ttft = self._histogram("ttft_seconds", "Time to first token.", TTFT_BUCKETS)
        self.queue_seconds = self._histogram("queue_seconds", "Time in the queue.", TTFT_BUCKETS)
        self.itl = self._histogram("itl_seconds", "Inter-token latency.", STEP_BUCKETS)
        self.step_seconds = Histogram(
            "glm_step_seconds",
            "Step duration.",
            ("model", "kind"),
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self.batch_rows = self._histogram("batch_rows", "Users per decode step.", ROW_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"glm_{name}", text, ("model",), buckets=buckets, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the engines' own counters, read when metrics are scraped."""
        all_stats = self._stats()
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(f"glm_{name}", text, labels=("model",))
            for model, stats in all_stats.items():
                gauge.add_metric((model,), value(stats))
            yield gauge
        caches = GaugeMetricFamily(
            "glm_cache_bytes",
            "KV cache memory: reserved for full slots, resident for the tokens in them.",
            labels=("model", "kind"),
        )
        for model, stats in all_stats.items():
            for kind, value in CACHE_BYTES:
                caches.add_metric((model, kind), value(stats))
        yield caches
        for name, text, value in COUNTERS:
            counter = CounterMetricFamily(f"glm_{name}", text, labels=("model",))
            for model, stats in all_stats.items():
                counter.add_metric((model,), value(stats))
            yield counter

    def describe(self) -> list[Metric]:
        """Empty, because the metrics of `collect` depend on the models."""
        return []

    def record_step(self, model: str, report: StepReport) -> None:
        """Called on the device thread, after every step."""
        self.step_seconds.labels(model, report.kind).observe(report.seconds)
        if report.kind != "prefill":
            self.batch_rows.labels(model).observe(report.rows)

    def record_finished(self, model: str, outcome: str, result: Optional[GenerationResult]) -> None:
        """Records the end of a request; without a result if its client disconnected."""
        self.requests.labels(model, outcome).inc()
        if result is None or result.timings.ttft_s is None:
            return
        self.queue_seconds.labels(model).observe(result.timings.queued_s)
        self.ttft.labels(model).observe(result.timings.ttft_s)
        itl = self.itl.labels(model)
        times = result.timings.token_times
        for before, after in zip(times, times[1:]):
            itl.observe(after - before)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
