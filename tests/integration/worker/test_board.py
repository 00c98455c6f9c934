"""The board and the alert rules ask for what is exported, with labels that it has."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from omlx_gateway.app import create_app
from omlx_gateway.metrics import MeasuredApp, serve_metrics
from omlx_producer.wire import MODELS_KEY
from tests.helpers.gateway import running_gateway
from tests.helpers.metrics import measured_worker, scrape
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import ALIAS, wait_for

DOCS = Path(__file__).parents[3] / "docs"
BOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = {
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in BOARD["panels"]
        for target in panel["targets"]
    },
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{
        each["name"]: each["definition"]
        for each in BOARD["templating"]["list"]
        if "definition" in each
    },
}
QUERIES["models"] = BOARD["templating"]["list"][1]["definition"]
# Prometheus adds this one.
SCRAPED = {"instance"}
METRIC = re.compile(r"\b(omlx_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")

OF_HEALTH = frozenset({("handler", "health"), ("status", "200")})

Labels = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def exported() -> Labels:
    """The values of each label of each metric of a worker without a job, and of a gateway."""
    found: Labels = defaultdict(lambda: defaultdict(set))
    with (
        redis_server() as server,
        Redis.from_url(server.url) as connection,
        measured_worker(server.url) as (_, port),
    ):
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        app = MeasuredApp(create_app(server.url))
        with (
            running_gateway(server.url, app=app) as url,
            serve_metrics("127.0.0.1", 0, app, server.url) as other,
        ):
            with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
                assert answer.status == 200
            wait_for(lambda: ("omlx_http_requests_total", OF_HEALTH) in scrape(other))
            both = scrape(port) | scrape(other)
        for name, labels in both:
            # Also one without labels.
            values = found[name]
            for label, value in labels:
                values[label].add(value)
    return found


def faults(query: str, exported: Labels) -> Iterator[str]:
    """What a query asks for that is not exported."""
    asked = METRIC.findall(query)
    known = set(SCRAPED)
    for name, selectors in asked:
        if name not in exported:
            yield f"no metric {name}"
            continue
        known |= exported[name].keys()
        for label, how, values in re.findall(r'(\w+)(=~|=)"([^"]*)"', selectors):
            if label not in exported[name]:
                yield f"no label {label} of {name}"
            elif not values.startswith("$"):
                wanted = set(values.split("|")) if how == "=~" else {values}
                yield from (f"no {label} {v}" for v in wanted - exported[name][label])
    if not asked:
        yield "no metric"
    # Each grouping is about the metrics of the whole query; that is near enough.
    for group in GROUPED.findall(query):
        yield from (f"no label {name}" for name in group.split(", ") if name not in known)


@pytest.mark.parametrize("title", QUERIES)
def test_every_query_asks_for_what_is_exported(title: str, exported: Labels) -> None:
    assert list(faults(QUERIES[title], exported)) == []
    for opening, closing in ("()", "{}", "[]"):
        assert QUERIES[title].count(opening) == QUERIES[title].count(closing)


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(omlx_tokens)", "no metric omlx_tokens"),
        ('omlx_jobs_total{reason="failed"}', "no label reason of omlx_jobs_total"),
        ('omlx_jobs_total{outcome=~"failed|broken"}', "no outcome broken"),
        ("sum by (queue) (omlx_workers)", "no label queue"),
        ("vector(1)", "no metric"),
    ],
)
def test_a_wrong_query_is_found(query: str, fault: str, exported: Labels) -> None:
    assert list(faults(query, exported)) == [fault]


def test_every_metric_is_on_the_board(exported: Labels) -> None:
    def whole(names: Iterable[str]) -> set[str]:
        parts = r"_(bucket|count|sum)$"
        return {re.sub(parts, "", name) for name in names if not name.endswith("_created")}

    shown = {name for query in QUERIES.values() for name, _ in METRIC.findall(query)}
    assert whole(exported) == whole(shown)


def test_the_legends_name_labels_that_the_queries_keep() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            kept = {n for group in GROUPED.findall(target["expr"]) for n in group.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_there_are_five_rules_and_each_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 5
    for rule in RULES:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[mh]", rule["for"])


def test_panels_lie_side_by_side() -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}
    assert len(places) == len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
