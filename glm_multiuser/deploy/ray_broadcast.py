"""Broadcast requests, and merging the responses of the replicas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response

from glm_multiuser.deploy.ray_replica import NO_ANSWER, ReplicaResponse
from glm_multiuser.server.metrics import CONTENT_TYPE
from glm_multiuser.server.middleware import HEALTH_PATHS

SESSIONS = "/v1/sessions"
READ = ("/metrics", "/status", SESSIONS)
STATISTICS = re.compile(r"/v2/models(/[^/]+)?(/versions/[^/]+)?/stats")
SHARED = ("on_disk", "disk_bytes")
"""Session counts that are not summed: replicas share the folder and count the same files."""
CHANGES = re.compile(r"/v2/repository/models/[^/]+/(load|unload)")


class IngressMetrics:
    """The ingress's own metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "glm_ingress_responses", "Responses by status.", ("status",), registry=self.registry
        )
        self.retries = Counter(
            "glm_ingress_retries",
            "Requests sent to another replica because the first one died or was full.",
            registry=self.registry,
        )
        self.interrupted = Counter(
            "glm_ingress_interrupted_streams",
            "Streams interrupted because their replica died.",
            registry=self.registry,
        )
        self.missing = Gauge(
            "glm_ingress_unanswered_replicas",
            "Replicas that did not answer the last request to all of them.",
            registry=self.registry,
        )

    def record_response(self, status: int) -> None:
        """Counts a response that has started."""
        self.responses.labels(str(status)).inc()


def is_broadcast(method: str, path: str) -> bool:
    """Whether a request goes to every replica."""
    if method == "POST":
        return CHANGES.fullmatch(path) is not None
    if method == "DELETE":
        return path.startswith("/v1/sessions/")
    if method not in ("GET", "HEAD"):
        return False
    return path in (*READ, *HEALTH_PATHS) or STATISTICS.fullmatch(path) is not None


def merge_responses(
    path: str, responses: Sequence[ReplicaResponse], ingress: IngressMetrics
) -> Response:
    """Merges the responses of the replicas into one for the client.

    A deployment is ready when one replica is. For other paths the highest status wins, and bodies
    are merged if every status is 200. Reads skip replicas that did not answer, unless none did.

    Args:
        path: of the request.
        responses: at least one.
        ingress: metrics to update, and to add to `/metrics`.
    """
    missing = [one.replica for one in responses if one.status == NO_ANSWER]
    if path in READ or STATISTICS.fullmatch(path):
        responses = [one for one in responses if one.status != NO_ANSWER] or responses
    if path not in HEALTH_PATHS:  # where one response is enough
        ingress.missing.set(len(missing))
    choose = min if path in HEALTH_PATHS else max
    chosen = choose(responses, key=lambda one: one.status)
    if chosen.status == 200 and path == "/metrics":
        return Response(merged_metrics(responses, ingress), media_type=CONTENT_TYPE)
    if path.startswith(f"{SESSIONS}/"):
        return _relayed(chosen)
    if chosen.status == 200 and path not in HEALTH_PATHS and chosen.body:
        merge: Callable[[dict[str, Any]], Any] = MERGES.get(path, _statistics)
        contents = {one.replica: json.loads(one.body) for one in responses}
        merged = merge(contents)
        return JSONResponse({**merged, "unanswered": missing} if path == "/status" else merged)
    return _relayed(chosen)


def _relayed(chosen: ReplicaResponse) -> Response:
    kept = ("content-type", "retry-after", "www-authenticate", "allow")
    headers = {name.decode(): value.decode("latin-1") for name, value in chosen.headers}
    headers = {name: value for name, value in headers.items() if name in kept}
    return Response(chosen.body, chosen.status, headers)


def merged_metrics(responses: Iterable[ReplicaResponse], ingress: IngressMetrics) -> bytes:
    """Renders the metrics of all replicas, with a label `replica`, and those of the ingress."""
    families: dict[str, Metric] = {}
    for response in responses:
        for family in text_string_to_metric_families(response.body.decode("utf-8")):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": response.replica})
                for sample in family.samples
            ]
    return generate_latest(_Collected(families.values())) + generate_latest(ingress.registry)


class _Collected(CollectorRegistry):
    """A registry of metrics that are already collected."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _status(contents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums numbers, and renumbers each model's slots across replicas."""
    first, *_ = contents.values()
    states = [one["state"] for one in contents.values()]
    slots = [
        {**slot, "replica": replica} for replica, one in contents.items() for slot in one["slots"]
    ]
    seen: dict[str, int] = {}
    for slot in slots:
        slot["slot"] = seen.get(slot["model"], 0)
        seen[slot["model"]] = slot["slot"] + 1
    rates = [one["tokens_per_second"] for one in contents.values()]
    longest = max(len(rate["last_minute"]) for rate in rates)
    # Replicas that started later have a shorter history.
    padded = [[0] * (longest - len(one["last_minute"])) + one["last_minute"] for one in rates]
    sessions = [one["sessions"] for one in contents.values()]
    return {
        **first,
        "state": "ready" if "ready" in states else states[0],
        "loading": next((one["loading"] for one in contents.values() if one["loading"]), None),
        "models": _models([one["models"] for one in contents.values()]),
        "slots": slots,
        "sessions": {
            **_sum(sessions),
            **{name: max(one[name] for one in sessions) for name in SHARED},
        },
        "cache_bytes": _sum([one["cache_bytes"] for one in contents.values()]),
        "queue": _sum([one["queue"] for one in contents.values()]),
        "tokens_per_second": {
            "now": sum(one["now"] for one in rates),
            "last_minute": [sum(column) for column in zip(*padded)],
        },
        "totals": _sum([one["totals"] for one in contents.values()]),
        "replicas": list(contents),
    }


def _models(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A model is ready if it is ready on any replica; its slots are summed."""
    models: dict[str, dict[str, Any]] = {}
    for model in (model for models in lists for model in models):
        known = models.setdefault(model["name"], {**model, "users": 0})
        known["users"] += model["users"]
        if model["state"] == "ready":
            known["state"] = "ready"
    return list(models.values())


def _statistics(contents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums the counts of each model; responses to load and unload are empty."""
    if not any(contents.values()):
        return {}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in contents.values():
        for model in one["model_stats"]:
            by_name.setdefault(model["name"], []).append(model)
    return {"model_stats": [_sum(models) for models in by_name.values()]}


def _sum(values: Sequence[Any]) -> Any:
    """Sums numbers, also nested in objects; takes the first of other values."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _sum([value[name] for value in values]) for name in first}
    return sum(values) if isinstance(first, (int, float)) else first


def _sessions(contents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merges sessions by model and id; of several places, the first of slot, memory, disk wins.

    Of files without a known id, each replica lists those that only others can name, too.
    """
    places = ("slot", "memory", "disk")
    named: dict[tuple[str, str], dict[str, Any]] = {}
    for card in (card for one in contents.values() for card in one["data"]):
        if card["id"] is None:
            continue
        known = named.setdefault((card["model"], card["id"]), card)
        if places.index(card["place"]) < places.index(known["place"]):
            named[card["model"], card["id"]] = card
    unnamed: list[dict[str, Any]] = []
    for one in contents.values():
        own = {(card["model"], card["id"]) for card in one["data"]}
        others = [model for model, _ in named.keys() - own]
        rest = []
        for card in (card for card in one["data"] if card["id"] is None):
            if card["model"] in others:
                others.remove(card["model"])
            else:
                rest.append(card)
        unnamed = max(unnamed, rest, key=len)
    first, *_ = contents.values()
    return {**first, "data": [*named.values(), *unnamed]}


MERGES = {"/status": _status, SESSIONS: _sessions}
"""Merge functions by path; other paths use `_statistics`."""
