"""A worker on a thread that serves its metrics, and what a scrape of them says."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from omlx_worker.control.worker import GenerationWorker
from omlx_worker.metrics import serve_metrics
from tests.helpers.workers import running_worker

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int | str) -> Scrape:
    """All samples by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Scrape, name: str, **labels: str) -> float:
    """The sum over the samples with these labels."""
    some = [
        number
        for (each, has), number in found.items()
        if each == f"omlx_{name}" and has >= labels.items()
    ]
    assert some, name
    return sum(some)


@contextlib.contextmanager
def measured_worker(url: str, **options: Any) -> Iterator[tuple[GenerationWorker, int]]:
    """A worker and the port of its metrics."""
    with (
        running_worker(url, **options) as worker,
        serve_metrics("127.0.0.1", 0, worker, url) as port,
    ):
        yield worker, port
