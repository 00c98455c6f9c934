"""Faults that the suite must notice. Each turns the worker of its process into a broken one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from omlx_producer import lua as scripts
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import EXECUTION_PREFIX, GRACE_SECONDS, LeaseTable
from omlx_worker.queue.upkeep import Upkeep

MEETING = "chaos:meeting"


def commit_without_fence() -> None:
    """Results are written whether or not the lease is still held."""
    source = scripts.source

    def unfenced(name: str) -> str:
        text = source(name)
        if name != "commit":
            return text
        before, fence, after = text.partition("if not holds(queue, job, execution) then\n")
        assert fence
        return f"{before}if false then\n{after}"

    scripts.source = unfenced  # type: ignore[assignment]


def sweep_without_lock() -> None:
    """Expired leases are read, and then returned: two round trips, as RQ's own clean-up makes.

    Letting two workers lead would plant nothing: a script is atomic, and one leader only spares
    servers. What the lock of a sweep in two round trips would prevent is that two workers
    read the same leases; here they wait for each other to do so.
    """

    def sweep(upkeep: Upkeep) -> Iterator[list[str]]:
        self = upkeep._leases
        self.renew()
        seconds, _ = self.connection.time()  # type: ignore[misc]
        found = [
            (queue, *member.decode().split(":"))
            for queue in self.queues
            for member in self.connection.zrangebyscore(
                f"rq:wip:{queue}", "-inf", seconds + GRACE_SECONDS
            )
        ]
        if found:
            _meet(self, arrival=int(self.connection.incr(MEETING)))
        for queue, job, execution in found:
            assert execution.startswith(EXECUTION_PREFIX)
            self.connection.hset(f"rq:job:{job}", "status", "queued")
            self.connection.lpush(f"rq:queue:{queue}", job)
            self.connection.zrem(f"rq:wip:{queue}", f"{job}:{execution}")
            self.connection.zrem(f"rq:executions:{job}", execution)
            self.connection.delete(f"rq:execution:{job}:{execution}")
        yield [job for _, job, _ in found]

    Upkeep.lead = lambda _: True  # type: ignore[method-assign]
    Upkeep.sweep = sweep  # type: ignore[method-assign]


def _meet(leases: LeaseTable, arrival: int) -> None:
    """Wait for the other worker; the second one lets the first go ahead."""
    deadline = time.monotonic() + 10
    while int(leases.connection.get(MEETING) or 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if arrival == 2:
        time.sleep(0.3)


def claim_by_blpop() -> None:
    """A job leaves its queue in one call and is started in the next, as RQ's own dequeue does."""
    claim: Callable[..., Any] = LeaseTable.claim

    def pop_first(self: LeaseTable, *args: Any, **kwargs: Any) -> list[Claim] | None:
        popped = self.connection.blpop([f"rq:queue:{queue}" for queue in self.queues], timeout=1)
        if popped is None:
            return []
        from tests.system.chaos import points

        points.reach("popped")
        self.connection.lpush(*popped)
        claimed: list[Claim] | None = claim(self, *args, **kwargs)
        return claimed

    LeaseTable.claim = pop_first  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (commit_without_fence, sweep_without_lock, claim_by_blpop)
}
