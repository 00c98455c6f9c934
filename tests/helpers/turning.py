"""A worker of several models on a thread, each a fake engine that takes its time to load."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.wire import JOB_FUNCTION, ModelInfo, queue_name
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.engine.rows.interface import Tell
from omlx_worker.mac.machine import Mac
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import CONTEXT, FakeEngine
from tests.helpers.workers import on_a_thread


class Loads:
    """Makes the engines of a worker of several models.

    Args:
        seconds: that each load takes.
        faults: raised in place of an engine, by model; may be changed while it runs.

    Attributes:
        made: the models, in the order of their loads.
        kept: engines of earlier loads that something still held when the next one began.
        engines: that are open now.
        engine: arguments of those that are made next.
        progress: what each load tells.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        faults: Mapping[str, Exception] | None = None,
        **engine: Any,
    ) -> None:
        self.made: list[str] = []
        self.kept = 0
        self._all: list[weakref.ref[FakeEngine]] = []
        self.engines: list[FakeEngine] = []
        self.faults = dict(faults or {})
        self.most_open = 0
        self.gate = threading.Event()
        self.gate.set()
        self.progress = "reading the weights"
        self._seconds = seconds
        self.engine = engine

    def __call__(self, settings: WorkerSettings, tell: Tell) -> FakeEngine:
        tell(self.progress)
        gc.collect()
        self.kept += sum(each() is not None for each in self._all)
        self.made.append(settings.alias)
        time.sleep(self._seconds)
        self.gate.wait(20)
        if fault := self.faults.get(settings.alias):
            raise fault
        engine = FakeEngine(**self.engine)
        self._all.append(weakref.ref(engine))
        self.engines.append(engine)
        self.most_open = max(self.most_open, len(self.engines))
        close = engine.close

        def closing() -> None:
            close()
            self.engines.remove(engine)

        engine.close = closing  # type: ignore[method-assign]
        return engine


def describe(settings: WorkerSettings) -> ModelInfo:
    return ModelInfo(model=settings.model, context_length=CONTEXT, longest_token=1)


@contextlib.contextmanager
def turning_worker(
    url: str,
    models: Sequence[str],
    loads: Callable[[WorkerSettings, Tell], FakeEngine],
    *,
    burst: bool = False,
    machine: Mac | None = None,
    **options: Any,
) -> Iterator[GenerationWorker]:
    """A worker of these models on a thread; stopped at once when the block ends before it does."""
    connection = Redis.from_url(url)
    settings = [WorkerSettings(model="demo", model_alias=alias, **options) for alias in models]
    worker = GenerationWorker(
        settings, loads, connection=connection, describe=describe, machine=machine
    )
    with contextlib.closing(connection), on_a_thread(worker, burst=burst):
        yield worker
    for error in worker.test_errors:
        raise error


def enqueue_for(
    connection: Redis, model: str, prompt: str = "hello", priority: Any = "default", **fields: Any
) -> Job:
    """Enqueue a job for one of the models without waking a worker."""
    queue = Queue(queue_name(model, priority), connection=connection, serializer=JSONSerializer)
    request = {"model": model, "prompt": prompt, "seed": 1, **fields}
    return queue.enqueue(JOB_FUNCTION, kwargs={"request": request})
