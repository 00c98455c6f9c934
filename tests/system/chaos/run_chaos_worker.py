"""Worker processes that fall over where they are told to, and clients.

Started once, this script forks one process for every ``spawn`` on its standard input: importing
takes longer than most of these processes live. It ends, and kills them, when its input ends.

    {"spawn": {...}}  ->  {"pid": 123}                        the fields of `Orders`
    {"client": {...}} ->  {"pid": 123}                        the fields of `ClientOrders`
    {"poll": 123}     ->  {"code": null, "stopped": false}    the exit code, negative for a signal,
                                                              null while it lives
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

UNREACHED = 75  # sysexits.h: try again later
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "producer"), str(ROOT / "worker")]

from omlx_worker import build, connection, model_process, run  # noqa: E402
from omlx_worker.control import in_turn, served  # noqa: E402
from omlx_worker.control.worker import RedisGone  # noqa: E402
from omlx_worker.decode import thread  # noqa: E402
from omlx_worker.engine.rows.interface import ModelError, Tell  # noqa: E402
from omlx_worker.queue import lease, quarantine, upkeep  # noqa: E402
from omlx_worker.settings import WorkerSettings  # noqa: E402
from tests.helpers.fake_engine import FakeEngine  # noqa: E402
from tests.helpers.workers import ALIAS  # noqa: E402
from tests.system.chaos import plants, points, run_chaos_model  # noqa: E402
from tests.system.chaos.clients import ClientOrders, run_client  # noqa: E402


@dataclass
class Orders:
    """What one worker is to be.

    Attributes:
        at: (point, how often it is passed first, what happens there); see `points`.
        plant: a fault of `tests.system.chaos.plants` to have.
        demo: serve the demo model instead of the fake engine.
        models: aliases of those to serve in turn.
        at_of_process: as ``at``, for the n-th process that this worker starts for a model; n first.
        folder: has a file for each of several models; one whose file is gone cannot be loaded.
    """

    url: str
    log: str
    at: list[tuple[str, int, str]] = field(default_factory=list)
    plant: str | None = None
    demo: bool = False
    models: list[str] = field(default_factory=lambda: [ALIAS])
    at_of_process: list[tuple[int, str, int, str]] = field(default_factory=list)
    folder: str | None = None
    max_rows: int = 4
    step_seconds: float = 0.004
    lease_seconds: float = 1.0
    drain_timeout: float = 0.2
    redis_grace: float = 60.0


def load_fake(orders: Orders, settings: WorkerSettings, _: Tell) -> FakeEngine:
    points.reach("load")
    if orders.folder and not (Path(orders.folder) / settings.alias).exists():
        raise ModelError(f"--model {settings.alias}: no checkpoint; give another")
    return points.watched(FakeEngine(orders.max_rows, orders.step_seconds))


def disturb(orders: Orders) -> None:
    """Make this process one that the orders describe."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(threadName)s %(message)s"
    )
    points.arm(orders.at)
    if orders.plant:
        plants.PLANTS[orders.plant]()
    # Schedules kill far more often than that, and it is never a job's fault.
    lease.FATAL_DEATHS = 1000
    quarantine.QUARANTINE_SECONDS = 0.5
    upkeep.LEAD_MILLISECONDS = 100
    thread.LONGEST_CHUNK = 4
    if not orders.demo:
        build.load_engine = partial(load_fake, orders)
        build.describe = lambda _: FakeEngine().info


def work(orders: Orders) -> None:
    disturb(orders)
    in_turn.LOOK_SECONDS, in_turn.POLL_SECONDS, in_turn.DRAIN_SECONDS = 0.05, 0.02, 0.1
    served.FIRST_PAUSE = 0.2
    start, started = model_process.ModelProcess.__init__, itertools.count(1)

    def starts(self: model_process.ModelProcess, *args: Any) -> None:
        number = next(started)
        at = [order for n, *order in orders.at_of_process if n == number]
        os.environ[run_chaos_model.VARIABLE] = json.dumps(asdict(replace(orders, at=at)))
        start(self, *args)

    model_process.ModelProcess.__init__ = starts
    command = model_process.python_command
    model_process.python_command = lambda _, name: command(run_chaos_model.__name__, name)
    told = connection.redis_error

    def redis_error(error: Exception, *where: str) -> str:
        if not isinstance(error, RedisGone):
            logging.info("there is no server yet: %s", error)
            os._exit(UNREACHED)
        return told(error, *where)

    connection.redis_error = redis_error
    models = [
        WorkerSettings(
            model="demo" if orders.demo else "fake",
            model_alias=alias,
            max_batch=orders.max_rows,
            drain_timeout=orders.drain_timeout,
            redis_grace=orders.redis_grace,
            switch_after=2.0,
        )
        for alias in orders.models
    ]
    for settings in models:
        # Shorter than users may have it.
        settings.lease_seconds = orders.lease_seconds
    code = run.serve(models, orders.url)
    logging.info("ends with code %d", code)
    os._exit(code)


def spawn(orders: Orders | ClientOrders) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        output = os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if isinstance(orders, Orders):
            work(orders)
        else:
            run_client(orders)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        logging.exception("the process breaks")
        os._exit(70)
    os._exit(71)


class Child:
    """A forked worker, as its parent sees it."""

    def __init__(self, orders: Orders | ClientOrders) -> None:
        self.pid = spawn(orders)
        self.code: int | None = None
        self.stopped = False

    def poll(self) -> None:
        while self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not found:
                return
            self.stopped = os.WIFSTOPPED(status)
            if not self.stopped and not os.WIFCONTINUED(status):
                self.code = os.waitstatus_to_exitcode(status)


def main() -> None:
    children: dict[int, Child] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        if "spawn" in request or "client" in request:
            orders: Orders | ClientOrders = (
                Orders(**request["spawn"])
                if "spawn" in request
                else ClientOrders(**request["client"])
            )
            child = Child(orders)
            children[child.pid] = child
            answer = {"pid": child.pid}
        else:
            child = children[request["poll"]]
            child.poll()
            answer = {"code": child.code, "stopped": child.stopped}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for child in children.values():
        child.poll()
        if child.code is None:
            os.kill(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
