"""The whole path: a worker process with the demo model, a real server, producers and consumers."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis import Redis
from rq.cli import main as rq_cli

from omlx_producer import JobFailed, Producer
from omlx_producer.wire import EndEvent, JobEvent, Priority, TokensEvent, queue_name
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from tests.helpers.decoding import Loaded
from tests.helpers.demo_worker import worker
from tests.helpers.redis_server import cut_readers

TOKENS = 24


@pytest.fixture(scope="module")
def heldout() -> list[str]:
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    return ["\n".join(json.loads(line)["prompt"].splitlines()[:6]) for line in lines]


def text_of(stream: Iterable[JobEvent]) -> str:
    """Follow a stream to its end; every token must come once, in order."""
    text, count = "", 0
    for event in stream:
        if isinstance(event, TokensEvent):
            assert event.since == count
            count = event.n
            text += event.choices[0].text
        else:
            assert isinstance(event, EndEvent)
    return text


def executing(redis_url: str) -> int:
    """How many jobs `rq info` says are executing, all queues together."""
    result = CliRunner().invoke(rq_cli, ["info", "--url", redis_url, "--raw", "--only-queues"])
    assert result.exit_code == 0, result.output
    fields = [line.split() for line in result.output.splitlines() if line.startswith("queue omlx:")]
    return sum(int(part[3]) for part in fields)


def test_fifty_prompts_at_once_stream_what_they_result_in(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    prompts = [heldout[index % 20] for index in range(50)]
    with worker(redis_url, "--max-batch", "16"), ThreadPoolExecutor(25) as pool:
        producer = Producer(connection)
        jobs = [
            producer.submit(model="demo", prompt=prompt, max_completion_tokens=20)
            for prompt in prompts
        ]
        live = [pool.submit(text_of, producer.stream(job.id)) for job in jobs[::2]]
        seen = []
        while not all(stream.done() for stream in live):
            seen.append(executing(redis_url))
            time.sleep(0.05)
        results = [producer.result(job.id, timeout=120) for job in jobs]
        late = [text_of(producer.stream(job.id)) for job in jobs[1::2]]

    texts = [result["choices"][0]["text"] for result in results]
    assert [stream.result() for stream in live] == texts[::2]
    assert late == texts[1::2]
    assert max(seen) == 16
    assert all(result["usage"]["completion_tokens"] <= 20 for result in results)
    # The same prompt gives the same text, whatever its company was.
    assert len({(prompt, text) for prompt, text in zip(prompts, texts, strict=True)}) == len(
        set(prompts)
    )
    assert executing(redis_url) == 0


def test_greedy_text_through_redis_is_mlx_lms_own(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    with worker(redis_url, "--mode", "mtp", "--mtp-depth", "3"):
        producer = Producer(connection)
        jobs = [
            producer.submit(
                model="demo",
                prompt=text,
                max_completion_tokens=TOKENS,
                temperature=0.0,
                ignore_eos=True,
            )
            for text in heldout[:2]
        ]
        results = [producer.result(job.id, timeout=120) for job in jobs]

    for result in results:
        speculation = result["usage"]["speculation"]
        # The last step may have had more tokens than were wanted.
        decoded = speculation["steps"] + sum(speculation["accepted"])
        assert TOKENS <= decoded <= TOKENS + 3
        assert sum(speculation["accepted"]) > 3
    texts = [result["choices"][0]["text"] for result in results]
    demo = Loaded.demo()
    for prompt, text in zip(heldout, texts, strict=False):
        tokens = demo.greedy(demo.tokenizer.encode(prompt), TOKENS)
        assert text == demo.tokenizer.decode(tokens).rstrip("�")


def test_consumers_whose_connections_are_cut_see_every_token_once(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    with worker(redis_url), ThreadPoolExecutor(4) as pool:
        producer = Producer(connection)
        jobs = [
            producer.submit(model="demo", prompt=text, max_completion_tokens=150, ignore_eos=True)
            for text in heldout[:3]
        ]
        begun = [producer.stream(job.id) for job in jobs]
        # A connection that is cut before its first answer is not made again.
        streams = [pool.submit(text_of, chain([next(stream)], stream)) for stream in begun]
        cuts = 0
        while not all(stream.done() for stream in streams):
            # The worker's own subscription is cut as well, and must come back.
            cuts += connection.client_kill_filter(_type="pubsub")
            cuts += cut_readers(connection)
            time.sleep(0.1)
        results = [producer.result(job.id, timeout=60) for job in jobs]

    assert cuts > 5
    assert [stream.result() for stream in streams] == [
        result["choices"][0]["text"] for result in results
    ]


def test_a_bad_job_fails_with_a_sentence_and_the_good_ones_beside_it_finish(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    with worker(redis_url):
        producer = Producer(connection)
        good = producer.submit(model="demo", prompt=heldout[0], max_completion_tokens=20)
        bad = producer.submit(model="demo", prompt=[1] * 4096)
        after = producer.submit(model="demo", prompt=heldout[1], max_completion_tokens=20)

        with pytest.raises(JobFailed, match="4096 tokens do not fit the context of demo"):
            producer.result(bad.id, timeout=60)
        assert producer.result(good.id, timeout=60)["choices"][0]["text"]
        assert producer.result(after.id, timeout=60)["choices"][0]["text"]


def test_a_worker_told_to_stop_finishes_what_runs_and_leaves_the_rest(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    producer = Producer(connection)
    with worker(redis_url, "--max-batch", "2") as process:
        jobs = [
            producer.submit(model="demo", prompt=text, max_completion_tokens=60, ignore_eos=True)
            for text in heldout[:6]
        ]
        started = threading.Event()
        follower = threading.Thread(
            target=lambda: [started.set() for _ in producer.stream(jobs[0].id)], daemon=True
        )
        follower.start()
        assert started.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0

    states = [producer.status(job.id).status for job in jobs]
    assert states.count("finished") >= 2
    assert states.count("queued") == 6 - states.count("finished")
    assert connection.llen(f"rq:queue:{queue_name('demo', 'default')}") == states.count("queued")


def test_a_worker_told_twice_stops_at_once_and_gives_its_jobs_back(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    producer = Producer(connection)
    with worker(redis_url) as process:
        jobs = [
            producer.submit(model="demo", prompt=text, max_completion_tokens=3000, ignore_eos=True)
            for text in heldout[:3]
        ]
        next(iter(producer.stream(jobs[0].id)))
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM

    assert {producer.status(job.id).status for job in jobs} == {"queued"}


def test_one_job_then_eight_then_one_drafts_batches_and_drafts_again(
    redis_url: str, connection: Redis, heldout: Sequence[str]
) -> None:
    lengths = [300, *[20] * 8]
    with worker(redis_url, "--mode", "hybrid"):
        producer = Producer(connection)

        def submit(index: int) -> str:
            return producer.submit(
                model="demo",
                prompt=heldout[index],
                max_completion_tokens=lengths[index],
                temperature=0.0,
                ignore_eos=True,
            ).id

        jobs = [submit(0)]
        next(iter(producer.stream(jobs[0])))
        jobs += [submit(index) for index in range(1, 9)]
        results = [producer.result(job, timeout=120) for job in jobs]

    demo = Loaded.demo()
    for index, result in enumerate(results):
        tokens = demo.greedy(demo.tokenizer.encode(heldout[index]), lengths[index])
        assert result["choices"][0]["text"] == demo.tokenizer.decode(tokens).rstrip("\ufffd")
    assert results[0]["usage"]["speculation"]["drafted"] > 0
    alone = [result["usage"]["speculation"]["drafted"] for result in results[1:]]
    assert alone == [0] * 8


@pytest.mark.parametrize("mode", ["batched", "mtp"])
def test_bulk_rows_make_place_for_a_high_job_and_go_on_without_losing_a_token(
    redis_url: str, connection: Redis, heldout: Sequence[str], tmp_path: Path, mode: str
) -> None:
    log = tmp_path / "worker.log"
    lengths = [200, 200, 20]
    with worker(redis_url, "--max-batch", "2", "--mode", mode, log=log):
        producer = Producer(connection)

        def submit(index: int, priority: Priority) -> str:
            fields = {"prompt": heldout[index], "max_completion_tokens": lengths[index]}
            fields |= {"model": "demo", "temperature": 0.0, "ignore_eos": True, "stream": True}
            return producer.submit(fields, priority=priority).id

        bulk = [submit(0, "bulk"), submit(1, "bulk")]
        for job in bulk:
            next(iter(producer.stream(job)))
        high = submit(2, "high")
        urgent = text_of(producer.stream(high))
        assert {producer.status(job).status for job in bulk} == {"started"}
        texts = [*(text_of(producer.stream(job)) for job in bulk), urgent]

    demo = Loaded.demo()
    for index, text in enumerate(texts):
        tokens = demo.greedy(demo.tokenizer.encode(heldout[index]), lengths[index])
        assert text == demo.tokenizer.decode(tokens).rstrip("\ufffd")
    assert "makes room for a more urgent one" in log.read_text()


def test_a_job_of_a_killed_worker_with_fixed_shapes_repeats_what_it_has_told(
    redis_url: str, connection: Redis, heldout: Sequence[str], tmp_path: Path
) -> None:
    options = "--fixed-shapes", "--mode", "mtp", "--max-batch", "4", "--lease-seconds", "1"
    request = {"model": "demo", "max_completion_tokens": 48, "ignore_eos": True, "seed": 7}
    producer, log = Producer(connection), tmp_path / "log"
    jobs, tokens = [], 0
    # A killed worker ends with another status.
    with contextlib.suppress(AssertionError), worker(redis_url, *options) as victim:
        jobs = [producer.submit(prompt=text, stream=True, **request) for text in heldout[:3]]
        for event in producer.stream(jobs[0].id):
            tokens = event.n if isinstance(event, TokensEvent) else 48
            if tokens >= 12:
                break
        victim.kill()
    connection.delete("omlx:models")
    assert 12 <= tokens < 48
    with worker(redis_url, *options, log=log):
        texts = [text_of(producer.stream(job.id)) for job in jobs]
        again = [producer.submit(prompt=text, **request) for text in reversed(heldout[:3])]
        results = [producer.result(job.id, timeout=120) for job in reversed(again)]

    assert texts == [result["choices"][0]["text"] for result in results]
    assert "does not repeat its text" not in log.read_text()
