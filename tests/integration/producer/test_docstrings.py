"""Everything public is documented, and the examples in the documentation are true."""

from __future__ import annotations

import asyncio
import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import omlx_producer
from omlx_producer import Producer
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.workers import running_worker

CLASSES = [name for name in omlx_producer.__all__ if isinstance(getattr(omlx_producer, name), type)]


def methods(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.fixture(scope="module")
def names(
    _session_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """What examples may use: the package's names, a producer with a worker, and an output.

    A worker that makes vectors has a database of its own.
    """
    url, vectors_url = (f"{_session_server.url.rsplit('/', 1)[0]}/{number}" for number in (0, 1))
    with redis.Redis.from_url(url) as connection, pytest.MonkeyPatch.context() as patch:
        connection.flushall()
        patch.setenv("OMLX_QUEUE_REDIS_URL", url)
        with (
            running_worker(url),
            running_worker(vectors_url, vector_size=4),
            Producer(url) as producer,
            redis.Redis.from_url(vectors_url) as vectors,
        ):
            wait_for_model(connection)
            wait_for_model(vectors)
            public = {name: getattr(omlx_producer, name) for name in omlx_producer.__all__}
            output = tmp_path_factory.mktemp("run") / "results.jsonl"
            own = {"producer": producer, "redis_url": url, "output": output}
            own["vectors_url"] = vectors_url
            yield {**public, **own, "asyncio": asyncio}


@pytest.mark.parametrize("name", CLASSES)
def test_the_examples_of_a_class_are_true(name: str, names: dict[str, Any]) -> None:
    found = doctest.DocTestFinder().find(getattr(omlx_producer, name), name, globs=names)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_and_method_is_documented(name: str) -> None:
    kind = getattr(omlx_producer, name)
    assert ">>>" in (kind.__doc__ or ""), f"{name} has no example"
    undocumented = [name for name, method in methods(kind).items() if not method.__doc__]
    assert undocumented == []


def test_every_method_of_a_producer_has_an_example() -> None:
    assert [name for name, m in methods(Producer).items() if ">>>" not in m.__doc__] == []
