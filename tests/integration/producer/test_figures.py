"""status and models: what waits in Redis and what workers have announced, whatever they wrote."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError
from rich.console import Console

from omlx_producer.cli import overview
from omlx_producer.cli.overview import draw_figures, draw_models, watch_figures
from omlx_producer.client.workers import SILENT_SECONDS
from omlx_producer.connection import server_time
from omlx_producer.figures import read_figures
from omlx_producer.wire import MODELS_KEY, queue_name
from omlx_producer.wire.keys import workers_key
from tests.helpers.bulk_runs import upload
from tests.helpers.fake_worker import announce, sign_on
from tests.helpers.screens import attach


def enqueued(connection: redis.Redis, job_id: str, seconds_ago: float, priority: Any) -> None:
    """Put a job into a queue of the model demo, as RQ does."""
    at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    connection.hset(f"rq:job:{job_id}", "enqueued_at", at)
    connection.rpush(f"rq:queue:{queue_name('demo', priority)}", job_id)


def drawn(table: Any) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def waiting(connection: redis.Redis) -> dict[str, int]:
    [model] = read_figures(connection, "demo")
    return {name: queue.waiting for name, queue in model.queues.items()}


def test_the_oldest_job_of_any_queue_counts(connection: redis.Redis) -> None:
    announce(connection)
    enqueued(connection, "a", 5, "high")
    enqueued(connection, "b", 90, "bulk")
    enqueued(connection, "c", 10, "bulk")
    [model] = read_figures(connection)
    assert waiting(connection) == {"high": 1, "default": 0, "bulk": 2}
    assert model.oldest_seconds == pytest.approx(90, abs=2)


@pytest.mark.parametrize("date", [None, "junk"])
def test_a_job_without_a_date_has_no_age(connection: redis.Redis, date: str | None) -> None:
    announce(connection)
    enqueued(connection, "a", 5, "high")
    if date is None:
        connection.delete("rq:job:a")
    else:
        connection.hset("rq:job:a", "enqueued_at", date)
    [model] = read_figures(connection)
    assert (model.queues["high"].jobs, model.oldest_seconds) == (1, None)


def test_rows_of_batches_wait_like_jobs_until_they_are_dropped(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.figures._LISTS_AT_ONCE", 2)
    announce(connection)
    batch, other = upload(connection, 268), upload(connection, model="unserved")
    enqueued(connection, "a", 5, "bulk")
    demo, unserved = read_figures(connection)
    assert (demo.queues["bulk"].jobs, demo.queues["bulk"].batch_rows) == (1, 268)
    assert demo.oldest_seconds == pytest.approx(5, abs=2)
    assert (unserved.alias, unserved.info, unserved.queues["bulk"].waiting) == ("unserved", None, 3)
    assert "269" in drawn(draw_figures([demo])).split()
    batch.cancel()
    other.cancel()
    [demo] = read_figures(connection)
    assert waiting(connection) == {"high": 0, "default": 0, "bulk": 1}


def test_the_text_of_a_script_is_sent_once(connection: redis.Redis) -> None:
    announce(connection)
    connection.script_flush()
    before = connection.info("commandstats").get("cmdstat_eval", {"calls": 0})["calls"]
    for _ in range(3):
        read_figures(connection)
    assert connection.info("commandstats")["cmdstat_eval"]["calls"] == before + 1


def test_the_tables_show_queues_and_workers(connection: redis.Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-1")
    for _ in range(2):
        connection.rpush(f"rq:queue:{queue_name('demo', 'bulk')}", "gone")
    lines = [line.split() for line in drawn(draw_figures(read_figures(connection))).splitlines()]
    assert ["demo", "models/demo", "0", "0", "2", "-", "1"] in lines
    assert ["mac-1", "busy", "3/8", "2", "2", "(auto)", "75%", "123", "2.0/8.0", "G"] in lines
    lines = [line.split() for line in drawn(draw_models(read_figures(connection))).splitlines()]
    assert ["demo", "models/demo", "1024", "?", "1", "3/8"] in lines


def test_the_cached_share_has_a_column_once_there_is_any(connection: redis.Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-1", cached=0.0)
    assert "cached" not in drawn(draw_figures(read_figures(connection)))
    sign_on(connection, "mac-2", cached=0.38)
    sign_on(connection, "mac-3")
    lines = [line.split() for line in drawn(draw_figures(read_figures(connection))).splitlines()]
    assert [line[6:8] for line in lines if line[:1] == ["mac-1"]] == [["75%", "0%"]]
    assert [line[6:8] for line in lines if line[:1] == ["mac-2"]] == [["75%", "38%"]]
    assert [line[6:8] for line in lines if line[:1] == ["mac-3"]] == [["75%", "-"]]


def test_below_the_table_is_why_a_busy_worker_drafts_as_deep_as_it_does(
    connection: redis.Redis,
) -> None:
    announce(connection)
    told = "depth 2: +13% against depth 0"
    sign_on(connection, "mac-1", reason=told)
    sign_on(connection, "mac-2", reason="depth 3 throughout", mode="mtp")
    sign_on(connection, "mac-3", reason="nothing is known yet", rows=0)
    lines = drawn(draw_figures(read_figures(connection))).splitlines()
    assert [line for line in lines if "drafts:" in line] == [f"mac-1 drafts: {told}"]


def test_a_name_is_whole_beside_the_cached_share(connection: redis.Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-studio-12", cached=0.38)
    lines = [line.split() for line in drawn(draw_figures(read_figures(connection))).splitlines()]
    assert [line[1] for line in lines if line[:1] == ["mac-studio-12"]] == ["busy"]


def test_memory_that_would_be_nothing_in_gib_is_shown_in_mib(connection: redis.Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-1", used=43 * 2**20)
    assert "43.0 M/8.0 G" in drawn(draw_figures(read_figures(connection)))


def test_the_figures_of_an_older_worker_have_no_cached_share(connection: redis.Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-1")
    [(name, document)] = connection.hgetall(workers_key("demo")).items()
    older = {key: value for key, value in json.loads(document).items() if key != "cached"}
    connection.hset(workers_key("demo"), name, json.dumps(older))
    [model] = read_figures(connection)
    assert [worker.cached for worker in model.workers] == [None]


def test_names_are_neither_markup_nor_commands_of_the_terminal(connection: redis.Redis) -> None:
    name = "bad[/nope]\x1b]0;t\n"
    announce(connection, name)
    sign_on(connection, name, model=name)
    found = read_figures(connection)
    for table in (draw_figures(found), draw_models(found)):
        shown = drawn(table)
        assert "bad[/nope]\\x1b]0;t\\x0a" in shown
        assert "\x1b" not in shown


def test_a_broken_entry_is_left_out_and_told_once(
    connection: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    announce(connection)
    connection.hset(MODELS_KEY, "broken-1", '{"model": 5}')
    connection.hset(workers_key("demo"), "broken-2", '{"name": "x"}')
    for _ in range(2):
        (found,) = read_figures(connection)
        assert (found.alias, found.workers) == ("demo", [])
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the entry 'broken-1' of omlx:models, which is not a model",
        "ignoring the figures of worker 'broken-2', which another version wrote",
    ]


LONG_NAME = "mlx-community/Qwen3.5-35B-A3B-4bit"


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_status_keeps_words_and_figures_whole_at_any_width(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    announce(connection, LONG_NAME)
    sign_on(connection, "mac-studio-12.local.4711.a1b2c3", LONG_NAME, cached=0.38, jobs=8)
    sign_on(connection, "dead", LONG_NAME, jobs=8, at=server_time(connection) - 15.7)
    screen = attach(monkeypatch, columns, stream="stdout")
    overview.TableConsole().print(draw_figures(read_figures(connection)))
    lines = screen.lines
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    for whole in ("high", "default", "bulk", "workers", "busy", "3/8", "tok/s", "123"):
        assert whole in words
    if columns >= 80:
        assert {"depth", "2", "(auto)", "2.0/8.0"} <= set(words)
    if columns >= 120:
        assert {LONG_NAME, "mac-studio-12.local.4711.a1b2c3", "cached", "38%"} <= set(words)
    # Names may be folded, but not to letters.
    assert len(lines) <= 16
    assert "dead has been silent for 16 s; its 8 jobs go on elsewhere in 22 s" in " ".join(words)
    screen = attach(monkeypatch, columns, stream="stdout")
    overview.TableConsole().print(draw_models(read_figures(connection)))
    assert len(screen.lines) <= 6
    assert "1024" in " ".join(screen.lines).split()


def test_a_dead_worker_stays_for_its_lease_and_a_minute(connection: redis.Redis) -> None:
    def told(silent: float, **fields: Any) -> list[str]:
        sign_on(connection, "mac-1", at=server_time(connection) - silent, **fields)
        text = " ".join(drawn(draw_figures(read_figures(connection))).split())
        assert ("busy" in text) == (abs(silent) < SILENT_SECONDS)
        return re.findall("mac-1 has been .*", text)

    announce(connection)
    alone = "mac-1 has been silent for {}; its 3 jobs go on once another worker serves demo"
    assert told(10) == []
    assert told(16) == [alone.format("16 s")]
    assert told(89) == [alone.format("1 min 29 s")]
    assert told(91) == []
    assert told(-3600) == [], "the clock has gone back"
    assert told(100, lease_seconds=60) == [alone.format("1 min 40 s")]
    assert told(16, jobs=0) == ["mac-1 has been silent for 16 s"]
    sign_on(connection, "mac-2")
    assert drawn(draw_figures(read_figures(connection))).count("mac-1") == 1
    sign_on(connection, "mac-1", at=server_time(connection) - 16, jobs=1)
    [model] = read_figures(connection)
    assert [worker.name for worker in model.workers] == ["mac-2"]
    assert [(worker.name, worker.jobs) for worker in model.gone] == [("mac-1", 1)]
    [note] = model.notes
    assert re.fullmatch(
        "mac-1 has been silent for 16 s; its 1 job goes on elsewhere in 2[12] s", note
    )


class Turns:
    """The sleeps of a watch: Redis goes after the first, comes back, and then Ctrl-C."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._turn = 0
        self._read = read_figures
        patch.setattr(overview.time, "sleep", self)

    def __call__(self, seconds: float) -> None:
        self._turn += 1
        if self._turn == 1:
            self._patch.setattr(overview, "read_figures", self._refuse)
        elif self._turn == 2:
            self._patch.setattr(overview, "read_figures", self._read)
        else:
            raise KeyboardInterrupt

    def _refuse(self, _: redis.Redis) -> None:
        raise ConnectionError("refused")


def test_a_watch_goes_on_when_redis_is_back(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(connection)
    Turns(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        watch_figures(connection, 2, as_json=False)
    blocks = capsys.readouterr().out.split("no worker serves demo")
    assert len(blocks) == 4
    said = ["Redis is unavailable (refused); waiting for it" in block for block in blocks]
    assert said == [False, True, False, False]


def test_a_watch_in_json_prints_a_line_a_turn(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(connection)
    Turns(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        watch_figures(connection, 2, as_json=True)
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["models"][0]["alias"] == third["models"][0]["alias"] == "demo"
    assert second["error"] == "Redis is unavailable (refused); waiting for it"
