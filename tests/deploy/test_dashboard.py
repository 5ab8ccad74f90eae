"""The Grafana dashboard: every query asks for metrics and labels that a server has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.dockerfile import ROOT
from tests.server.asking import ask, get
from tests.server.in_process import in_process_server

DASHBOARD = json.loads(
    (ROOT / "deploy/grafana/dashboards/glm-multiuser.json").read_text(encoding="utf-8")
)
OF_PROMETHEUS = frozenset({"instance", "job"})
"""Labels that Prometheus adds to every sample."""
LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")
INNER = ("expr", "vector_selector", "lhs", "rhs")
"""Attributes of a parsed query with a part of it."""

Labels = dict[str, frozenset[str]]


@pytest.fixture(scope="module")
def page() -> Labels:
    """Labels of every sample in `/metrics`, by its name."""
    with in_process_server() as server:
        ask(server, "hello")
        text = get(server, "/metrics").text
    found: dict[str, frozenset[str]] = defaultdict(frozenset)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= OF_PROMETHEUS | set(sample.labels)
    return dict(found)


def inner_parts(query: Any) -> list[Any]:
    """The parts that a parsed query is made of."""
    single = [getattr(query, name, None) for name in INNER]
    return [one for one in [*single, *getattr(query, "args", ())] if one is not None]


def result_labels(query: Any, page: Labels) -> frozenset[str]:
    """Labels that the result of a query has; checks those that it names on the way."""
    if isinstance(query, promql_parser.VectorSelector):
        own = page[str(query.name)]
        assert {matcher.name for matcher in query.matchers.matchers} <= own
        return own
    labels: frozenset[str] = frozenset()
    for part in inner_parts(query):
        labels |= result_labels(part, page)
    modifier = getattr(query, "modifier", None)
    if isinstance(query, promql_parser.AggregateExpr):
        by = frozenset(modifier.labels if modifier else ())
        assert by <= labels
        return by
    if isinstance(query, promql_parser.BinaryExpr) and modifier and modifier.matching:
        assert set(modifier.matching.labels) <= labels
    return labels


PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(
    ("panel", "target"), QUERIES, ids=lambda one: one.get("title") or one["refId"]
)
def test_every_query_asks_for_what_there_is(panel: Any, target: Any, page: Labels) -> None:
    query = promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))
    labels = result_labels(query, page)
    shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    assert set(shown) <= labels


def test_variables_are_values_of_labels(page: Labels) -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    found = LABEL_VALUES.fullmatch(variables["model"]["query"]["query"])
    assert found
    assert found[2] in result_labels(promql_parser.parse(found[1]), page)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == {*variables, "__rate_interval", "__all"}


def test_every_metric_of_a_server_is_shown(page: Labels) -> None:
    shown = " ".join(target["expr"] for _, target in QUERIES)
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in page}
    ours = {name for name in families if name.startswith("glm_")}
    assert {name for name in ours if name not in shown} == set()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_query_for_what_there_is_not_is_seen(page: Labels) -> None:
    for query in (
        "glm_nothing",
        'rate(glm_steps_total{user="a"}[1m])',
        "sum by (user) (glm_users)",
        "glm_users and on (nothing) glm_users",
    ):
        with pytest.raises((AssertionError, KeyError)):
            result_labels(promql_parser.parse(query), page)
