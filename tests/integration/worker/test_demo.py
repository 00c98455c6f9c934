"""The demo: what it shows, whom it kills, and how it ends."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
import redis
from rich.console import Console

from omlx_producer.wire import (
    ChoiceDelta,
    EndEvent,
    Speculation,
    TokensEvent,
    Usage,
    events_key,
)
from omlx_worker.demo import run
from omlx_worker.demo.run import Show, Shown, draw_table, figures, wait_until_ready


def shown(number: int, generated: str = "", tokens: int = 7) -> Shown:
    return Shown(number, f"job-{number}", pieces=[(generated, False)], tokens=tokens)


def ended(job: Shown, speculation: Speculation | None = None) -> Shown:
    usage = Usage(
        prompt_tokens=5,
        completion_tokens=job.tokens,
        total_tokens=5 + job.tokens,
        speculation=speculation or Speculation(),
    )
    job.end = EndEvent(
        type="done", job_id="j", n=job.tokens, finish_reasons=["length"], usage=usage
    )
    job.whole = True
    return job


class FakeWorker:
    """A worker without a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.killed = False

    def require_running(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True


def show_of(jobs: list[Shown], connection: Any = None, kill_at: int = 20) -> Show:
    workers: Any = {"a": FakeWorker(97), "b": FakeWorker(98)}
    return Show(jobs, workers, connection, kill_at)


def drawn(show: Show, width: int = 80, height: int = 24) -> str:
    output = io.StringIO()
    Console(file=output, width=width, height=height).print(show.draw(width, height))
    return output.getvalue()


def test_workers_that_load_are_waited_for_as_long_as_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced = iter(({}, {"a": True, "b": False}, {"a": False, "b": False}))
    monkeypatch.setattr(
        run,
        "read_workers",
        lambda *_: [
            SimpleNamespace(name=name, is_loading=loading)
            for name, loading in next(announced).items()
        ],
    )
    monkeypatch.setattr(time, "monotonic", itertools.count(step=1000).__next__)
    workers: Any = {"a": FakeWorker(97), "b": FakeWorker(98)}
    wait_until_ready(workers, cast("redis.Redis", None))
    assert next(announced, None) is None


def test_drafted_parts_of_a_text_are_kept_apart() -> None:
    job = Shown(1)
    for n, text, drafted in ((3, "abcd", [(0, 1), (2, 3)]), (4, "ef", None)):
        delta = ChoiceDelta(index=0, text=text, tokens=[], drafted=drafted)
        job.take(TokensEvent(job_id="j", n=n, choices=[delta]))
    assert (job.text, job.tokens) == ("abcdef", 4)
    assert [text for text, drafted in job.pieces if drafted] == ["a", "c"]


def test_the_worker_with_the_most_jobs_is_killed_once_each_has_its_tokens(
    connection: redis.Redis,
) -> None:
    jobs = [shown(number, tokens=25) for number in range(1, 5)]
    for job, worker in zip(jobs, "abba", strict=True):
        connection.hset(f"rq:job:{job.job_id}", "worker_name", worker)
        connection.xadd(events_key(job.job_id), {"event": "x"}, id=f"{job.number * 10}-0")
    jobs[0].tokens = 19
    ended(jobs[3])
    show = show_of(jobs, connection)

    show.look()
    assert show.notice == ""
    assert [job.worker for job in jobs[:3]] == ["a", "b", "b"]
    assert "worker b: pid 98, 2 jobs" in drawn(show)

    jobs[0].tokens = 20
    show.look()
    assert [job.moved_at for job in jobs] == [None, 20, 30, None]
    assert show.notice.startswith("kill -9 98: worker b is dead, with 2 jobs")

    show.look()
    assert drawn(show).count("its worker was killed") == 2
    for job in jobs[1:3]:
        connection.hset(f"rq:job:{job.job_id}", "worker_name", "a")
    show.look()
    assert "worker a, from token 20" in drawn(show)
    assert show.notice == "worker a goes on with them, each from its last token"


def test_no_worker_is_killed_before_the_last_job_is_submitted(connection: redis.Redis) -> None:
    jobs = [shown(1, tokens=25), Shown(2)]
    show = show_of(jobs, connection)
    show.look()
    assert show.notice == ""


def test_the_figures_tell_what_came_whole_the_crash_and_the_drafts() -> None:
    speculation = Speculation(steps=10, drafted=15, accepted=[8, 2])
    jobs = [ended(shown(1, tokens=30), speculation), ended(shown(2, tokens=10), speculation)]
    jobs[1].moved_at = 4
    assert figures(jobs) == [
        "2 jobs, 40 tokens, 2 texts streamed without a gap or a repetition",
        "a worker died with 1 job; the other went on from tokens 4",
        "67% of 30 drafts accepted: a step brings 2.0 tokens a job instead of 1",
    ]


def test_a_text_with_a_gap_is_not_counted_as_whole() -> None:
    jobs = [ended(shown(1)), ended(shown(2))]
    jobs[0].whole = False
    assert "1 texts streamed" in figures(jobs)[0]


@pytest.mark.parametrize(
    ("generated", "valid"),
    [
        ('{"version": "1.1.0", "beta": false}', True),
        ('{"version": "1.1.0", "be', False),
        ('{"version": "1.1", "beta": false}', False),
        ('{"version": "1.1.0", "beta": "no"}', False),
        ('{"version": "1.1.0", "beta": false, "more": 1}', False),
    ],
)
def test_the_constrained_answer_is_praised_only_if_it_matches(generated: str, valid: bool) -> None:
    lines = figures([ended(shown(1, generated)), ended(shown(2, generated))])
    assert ("job 2 wrote JSON that matches its schema" in lines) == valid
    assert not any(line.startswith("job 1 ") for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (132, 43), (240, 70)])
def test_the_panels_of_all_jobs_fit_the_terminal(width: int, height: int) -> None:
    jobs = [shown(number, "    a long line\n" * 20 + "    the last") for number in range(1, 9)]
    jobs[0].worker, jobs[0].moved_at = "b", 12

    text = drawn(show_of(jobs), width, height)

    assert len(text.splitlines()) <= height - 1
    assert max(map(len, text.splitlines())) <= width
    assert text.count("the last") == 8
    assert all(f" {number}: 7 tokens " in text for number in range(3, 9))
    assert " 1: copies its prompt, 7 tokens " in text
    assert " worker b, from token 12 " in text
    assert "worker a: pid 97, 0 jobs   worker b: pid 98, 1 job" in text


def test_accepted_drafts_have_a_colour_of_their_own() -> None:
    output = io.StringIO()
    screen = Console(file=output, force_terminal=True, color_system="standard", width=80, height=24)
    job = Shown(3, pieces=[("drafted", True), (" own", False)])

    screen.print(show_of([job]).draw(80, 24))

    styles = {
        name: output.getvalue().split(name)[0].rsplit("\x1b", 1)[1]
        for name in ("def", "drafted", "own")
    }
    assert styles == {"def": "[2m", "drafted": "[1;32m", "own": "[0m "}


def test_the_table_shows_each_row_beside_the_answer_that_has_come(tmp_path: Path) -> None:
    (tmp_path / "releases.csv").write_text(f"id,call\n1,Package({'long' * 30}\n2,Package(two)\n")
    (tmp_path / "release.json").write_text('{"properties": {"name": {"type": "string"}}}')
    choice = {"message": {"content": '{"name": "a-long-name"}'}}
    line = {"custom_id": "1", "response": {"body": {"choices": [choice]}}}
    (tmp_path / "table.csv.jsonl").write_text(json.dumps(line) + '\n{"custom_id": "2", "resp')
    output = io.StringIO()

    Console(file=output, width=60).print(draw_table(tmp_path))

    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert lines[-2].startswith("Package(long")
    assert lines[-2].endswith("a-long-name")
    assert lines[-1].endswith("…")


def _own_terminal() -> None:
    """What a shell does in the foreground. In the background it lets programs ignore Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The demo on a terminal of 80 by 24, with no kernels kept by MLX."""

    def __init__(self, folder: Path) -> None:
        self._reader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "TMPDIR": str(folder)}
        command = str(shutil.which("omlx-worker", path=str(Path(sys.executable).parent)))
        self.process = subprocess.Popen(
            [command, "demo", "--max-tokens", "32"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(terminal)
        self.output = ""

    def read(self, until: str = "") -> None:
        """Read until some output, by default to the end."""
        while not until or until not in self.output:
            try:
                self.output += os.read(self._reader, 65536).decode(errors="replace")
            except OSError:
                return

    def press_ctrl_c(self) -> None:
        os.write(self._reader, b"\x03")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._reader)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_the_demo_survives_a_kill_makes_a_table_and_builds_no_kernels(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.read()
    assert terminal.process.wait() == 0, terminal.output
    assert "a toy of 28 MB" in terminal.output
    assert "goes on with them, each from its last token" in terminal.output
    assert "8 texts streamed without a gap or a repetition" in terminal.output
    assert re.search(r"\d+% of \d+ drafts accepted", terminal.output)
    assert "job 2 wrote JSON that matches its schema" in terminal.output
    table = terminal.output.rpartition("release.json")[2]
    assert all(text in table for text in ("flask", "3.0.2", "numpy", "requests"))
    assert "omlx-worker bench -m demo" in table
    if mx.default_device() == mx.cpu:
        assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["load the model", "accepted drafts", "kill -9", "omlx-submit run"]
)
def test_ctrl_c_ends_the_demo_with_130_and_leaves_nothing_behind(
    terminal: Terminal, tmp_path: Path, moment: str
) -> None:
    terminal.read(until=moment)
    terminal.press_ctrl_c()
    terminal.read()
    assert terminal.process.wait() == 130, terminal.output
    assert "Traceback" not in terminal.output
    assert list(tmp_path.glob("omlx-demo-*")) == []
    for pid in {int(pid) for pid in re.findall(r"worker [ab]: pid (\d+)", terminal.output)}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
