"""Workers that share a queue share out the beginnings of prompts, and no job waits for that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from redis import Redis
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job

from omlx_producer.bulk.ordering import arrange
from omlx_producer.bulk.row import Row
from omlx_producer.enqueue import Limits, NewJob
from omlx_producer.enqueue import enqueue as enqueue_checked
from omlx_producer.protocol import BEGINNING, GenerationRequest, Priority
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.leases import claim, commit, done, table
from tests.helpers.workers import ALIAS, fetch, queue

PASSES = 64
OWNER_KEY = f"omlx:beginning:omlx:{ALIAS}:bulk:{{}}"


def put(connection: Redis, *names: str, priority: Priority = "bulk") -> None:
    """Enqueue jobs with these ids. The letters before the number name the beginning; x is none."""
    jobs = [
        NewJob(
            name,
            GenerationRequest(model=ALIAS, prompt=name),
            priority,
            beginning="" if name.startswith("x") else name.rstrip("0123456789"),
        )
        for name in names
    ]
    enqueue_checked(connection, jobs, Limits(), lambda _: queue(connection, priority))


def taken(leases: LeaseTable, limit: int = 1) -> list[str]:
    return [job.id for job in claim(leases, limit)]


@pytest.fixture
def one(connection: Redis) -> LeaseTable:
    return table(connection, "worker-1")


@pytest.fixture
def two(connection: Redis) -> LeaseTable:
    return table(connection, "worker-2")


def test_each_worker_stays_with_its_beginning(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "a2", "a3", "b1", "b2", "b3")
    turns = [taken(leases) for _ in range(3) for leases in (one, two)]
    assert turns == [["a1"], ["b1"], ["a2"], ["b2"], ["a3"], ["b3"]]


def test_a_claim_of_many_jobs_leaves_the_others_their_beginnings(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "b1", "a2", "b2", "c1", "c2")
    assert taken(one) == ["a1"]
    assert taken(two, 4) == ["b1", "b2", "c1", "c2"]
    assert taken(one) == ["a2"]


def test_a_worker_prefers_its_own_beginning_to_one_that_nobody_has(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "b1", "a2", "c1", "b2")
    assert (taken(one), taken(two)) == (["a1"], ["b1"])
    assert taken(two) == ["b2"]
    assert taken(two) == ["c1"]


def test_a_worker_without_anything_else_to_do_helps(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, *(f"a{number}" for number in range(300)))
    assert taken(one) == ["a0"]
    assert taken(two, 298) == [f"a{number}" for number in range(1, 299)]
    put(connection, "b1")
    assert taken(one) == ["a299"], "the first owner still has it"


def test_jobs_that_name_no_beginning_are_never_overtaken(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "a2", "x1", "b1")
    assert taken(one) == ["a1"]
    assert taken(two, 3) == ["a2", "x1", "b1"]


def test_a_job_is_passed_over_a_limited_number_of_times(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "a2", *(f"b{number}" for number in range(PASSES + 10)))
    assert taken(one) == ["a1"]
    assert taken(two, PASSES) == [f"b{number}" for number in range(PASSES)]
    assert taken(two, 2) == ["a2", f"b{PASSES}"]


def test_better_queues_come_first_whatever_their_prompts(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "b1", "b2")
    assert (taken(one), taken(two)) == (["a1"], ["b1"])
    put(connection, "a3", priority="high")
    assert taken(two) == ["a3"]


def test_a_beginning_is_free_again_when_its_owner_takes_no_more_of_it(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "a2", "b1")
    assert taken(one) == ["a1"]
    assert 0 < connection.ttl(OWNER_KEY.format("a")) <= 300
    connection.delete(OWNER_KEY.format("a"))
    assert taken(two) == ["a2"]


def test_a_suspect_and_a_deleted_job_are_not_preferred(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    put(connection, "a1", "b1", "a2", "b2", "a3", "b3")
    assert (taken(one), taken(two)) == (["a1"], ["b1"])
    connection.hset(f"{RQ}:job:b2", "omlx_deaths", 2)
    assert taken(two) == ["a2"]
    connection.lrem(queue(connection, "bulk").key, 1, "b2")
    connection.hset(f"{RQ}:job:b3", "status", "canceled")
    assert taken(two) == ["a3"]


@pytest.mark.parametrize("meta", ["", "junk", '{"beginning": 5}', '{"beginning": "../*"}', "\xff"])
def test_a_meta_that_names_nothing_changes_nothing(
    connection: Redis, one: LeaseTable, two: LeaseTable, meta: str
) -> None:
    put(connection, "a1", "a2", "a3", "b1")
    assert taken(one) == ["a1"]
    connection.hset(f"{RQ}:job:a2", "meta", meta)
    assert taken(two) == ["a2"]
    connection.hset(f"{RQ}:job:a3", "meta", "{}")
    assert taken(two) == ["a3"]


def test_keys_of_another_type_stop_nobody(
    connection: Redis, one: LeaseTable, two: LeaseTable
) -> None:
    connection.hset(OWNER_KEY.format("a"), "of another", "type")
    put(connection, "a1", "a2", "b1", "c1")
    assert taken(one) == ["a1"]
    assert connection.get(OWNER_KEY.format("a")) == b"worker-1"
    connection.hset(OWNER_KEY.format("b"), "of another", "type")
    connection.hset(f"{RQ}:job:a2", "omlx_passed", "junk")
    assert taken(two) == ["b1"]
    connection.delete(f"{RQ}:job:c1")
    connection.set(f"{RQ}:job:c1", "of another type")
    assert taken(two) == ["a2"]


def test_a_job_that_was_passed_over_is_an_ordinary_job(connection: Redis, two: LeaseTable) -> None:
    put(connection, "a1", "a2", "b1")
    one = table(connection, "worker-1")
    assert (taken(one), taken(two)) == (["a1"], ["b1"])
    [job] = claim(one)
    commit(one, job, done(job.id))
    assert fetch(connection, "a2").get_status() == "finished"
    assert fetch(connection, "a2").get_meta() == {BEGINNING: "a"}


def read_of(connection: Redis, groups: int, each: int, workers: int) -> int:
    """How many beginnings workers read for a file, when they take one job after the other."""
    rows = [
        Row(f"{number}", number, GenerationRequest(model=ALIAS, prompt=text), f"{number:024x}")
        for number in range(groups * each)
        for text in [f"document {number % groups} " * 50 + f"question {number}"]
    ]
    jobs = [
        NewJob(f"row-{row.line}", row.request, "bulk", once=True, beginning=row.beginning)
        for row in arrange(rows)
    ]
    enqueue_checked(connection, jobs, Limits(), lambda _: queue(connection, "bulk"))
    tables: Sequence[LeaseTable] = [table(connection, f"worker-{n}") for n in range(workers)]
    read: set[tuple[str, str]] = set()
    while Queue(queue(connection, "bulk").name, connection=connection).count:
        for leases in tables:
            for job in claim(leases, 2):
                meta = Job.fetch(job.id, connection, serializer="json").get_meta()
                read.add((leases.worker_name, meta[BEGINNING]))
    return len(read)


def test_a_file_of_small_groups_is_read_once_by_all_workers_together(connection: Redis) -> None:
    groups = 20
    assert read_of(connection, groups, each=12, workers=3) <= 1.2 * groups
