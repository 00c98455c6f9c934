"""A worker of several models on a thread, each a fake engine that takes its time to load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.program import INVALID
from omlx_producer.wire import JOB_FUNCTION, ModelInfo, queue_name
from omlx_worker.control.in_turn import ModelsInTurn
from omlx_worker.control.status import Turn
from omlx_worker.control.worker import Describe, GenerationWorker
from omlx_worker.engine.rows.interface import ModelError, Tell
from omlx_worker.serving import BROKEN
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
        self.made.append(settings.alias)
        time.sleep(self._seconds)
        self.gate.wait(20)
        if fault := self.faults.get(settings.alias):
            raise fault
        engine = FakeEngine(**self.engine)
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


class ThreadProcess:
    """The process of a model, played by a thread."""

    metrics_url = ""

    def __init__(
        self, url: str, loads: Callable[..., FakeEngine], settings: WorkerSettings, turn: Turn
    ) -> None:
        self.sentence = ""
        self.code: int | None = None
        self.connection = Redis.from_url(url)
        self.worker = GenerationWorker(settings, loads, connection=self.connection, turn=turn)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.worker.work(burst=self.worker._settings.burst)
            self.code = self.worker.exit_code
        except ModelError as error:
            self.sentence, self.code = str(error), INVALID
        except Exception as error:  # noqa: BLE001 (as a process that ends with a sentence)
            self.sentence, self.code = f"the worker cannot go on: {error}", BROKEN
        self.connection.close()

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else self.code

    def terminate(self) -> None:
        self.worker.stop()

    def kill(self) -> None:
        pytest.fail("the process of a model has to be killed")


@contextlib.contextmanager
def turning_worker(
    url: str,
    models: Sequence[str],
    loads: Callable[[WorkerSettings, Tell], FakeEngine],
    *,
    burst: bool = False,
    **options: Any,
) -> Iterator[ModelsInTurn]:
    """A worker of these models on a thread; stopped at once when the block ends before it does.

    The processes of its models are in ``test_processes``.
    """
    connection = Redis.from_url(url)
    processes: list[ThreadProcess] = []

    def start(settings: WorkerSettings, turn: Turn) -> ThreadProcess:
        processes.append(ThreadProcess(url, loads, settings, turn))
        return processes[-1]

    settings = [WorkerSettings(model="demo", model_alias=alias, **options) for alias in models]
    worker = ModelsInTurn(settings, start, connection=connection, describe=describe)
    worker.test_processes = processes
    with contextlib.closing(connection), on_a_thread(worker, burst=burst):
        yield worker
    for error in worker.test_errors:
        raise error


@contextlib.contextmanager
def loading_worker(
    url: str,
    loads: Callable[[WorkerSettings, Tell], FakeEngine],
    *,
    describe: Describe = describe,
    **options: Any,
) -> Iterator[GenerationWorker]:
    """A worker of demo alone on a thread."""
    connection = Redis.from_url(url)
    machine = options.pop("machine", None)
    worker = GenerationWorker(
        WorkerSettings(model="demo", **options),
        loads,
        connection=connection,
        describe=describe,
        machine=machine,
    )
    with contextlib.closing(connection), on_a_thread(worker, burst=False):
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
