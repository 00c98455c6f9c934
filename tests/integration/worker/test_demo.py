"""The demo: what it shows, whom it kills, and how it ends."""

from __future__ import annotations

import fcntl
import io
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
from typing import Any

import mlx.core as mx
import pytest
import redis
from rich.console import Console

from omlx_producer.producer import Producer
from omlx_producer.wire import (
    ChoiceDelta,
    DoneEvent,
    Speculation,
    TokensEvent,
    Usage,
    events_key,
)
from omlx_worker.demo.display import Panels
from omlx_worker.demo.play import Play, Shown
from omlx_worker.demo.prompts import CONSTRAINED, COPY, Prompt
from omlx_worker.demo.run import figures
from omlx_worker.demo.table import draw


def shown(number: int, generated: str = "", tokens: int = 7, kind: str = "") -> Shown:
    entry = Shown(number, Prompt(f"def prompt_{number}():\n", kind), tokens=tokens)
    entry.pieces.append((generated, False))
    return entry


def ended(entry: Shown, speculation: Speculation | None = None) -> Shown:
    usage = Usage(
        prompt_tokens=5,
        completion_tokens=entry.tokens,
        total_tokens=5 + entry.tokens,
        speculation=speculation or Speculation(),
    )
    entry.end = DoneEvent(job_id="j", n=entry.tokens, finish_reasons=["length"], usage=usage)
    entry.whole = True
    return entry


class FakeCrew:
    """Two workers without processes."""

    def __init__(self) -> None:
        self.members: list[Any] = [SimpleNamespace(name=name, pid=ord(name)) for name in "ab"]

    def require_running(self) -> None:
        pass

    def kill(self, name: str) -> Any:
        [victim] = [member for member in self.members if member.name == name]
        self.members.remove(victim)
        return victim


def play_of(jobs: list[Shown], producer: Producer | None = None, kill_at: int = 1000) -> Play:
    return Play(jobs, FakeCrew(), producer, kill_at)  # type: ignore[arg-type]


def test_drafted_parts_of_a_text_are_kept_apart() -> None:
    entry = Shown(1, Prompt("x"))
    for n, text, drafted in ((3, "abcd", [(0, 1), (2, 3)]), (4, "ef", None)):
        delta = ChoiceDelta(index=0, text=text, tokens=[], drafted=drafted)
        entry.take(TokensEvent(job_id="j", n=n, choices=[delta]))
    assert (entry.generated, entry.tokens) == ("abcdef", 4)
    assert [text for text, drafted in entry.pieces if drafted] == ["a", "c"]


def test_the_worker_with_the_most_jobs_is_killed_and_the_other_goes_on(
    redis_url: str, connection: redis.Redis
) -> None:
    jobs = [shown(number, tokens=3) for number in range(1, 5)]
    for entry, worker in zip(jobs, "abba", strict=True):
        entry.job_id = f"job-{entry.number}"
        connection.hset(f"rq:job:{entry.job_id}", "worker_name", worker)
        connection.xadd(events_key(entry.job_id), {"event": "x"}, id=f"{entry.number * 10}-0")
    ended(jobs[3])
    with Producer(redis_url) as producer:
        play = play_of(jobs, producer, kill_at=13)
        play.look()
        assert (play.notice, play.moved) == ("", [])
        assert [entry.worker for entry in jobs[:3]] == ["a", "b", "b"]

        jobs[0].tokens = 4
        play.look()
        assert [member.name for member in play.crew.members] == ["a"]
        assert [(entry.number, entry.moved_at) for entry in play.moved] == [(2, 20), (3, 30)]
        assert play.notice.startswith("kill -9 98: worker b is dead, with 2 jobs")
        assert jobs[1].place == "its worker was killed"

        play.look()
        assert jobs[1].place == "its worker was killed"
        for entry in play.moved:
            connection.hset(f"rq:job:{entry.job_id}", "worker_name", "a")
        play.look()
        assert jobs[1].place == "worker a, from token 20"
        play.look()
        assert play.notice == "worker a goes on with them, each from its last token"


def test_the_figures_tell_what_came_whole_the_crash_and_the_drafts() -> None:
    speculation = Speculation(steps=10, drafted=15, accepted=[8, 2])
    jobs = [ended(shown(1, tokens=30), speculation), ended(shown(2, tokens=10), speculation)]
    jobs[1].moved_at = 4
    play = play_of(jobs)
    play.moved = [jobs[1]]
    assert figures(play) == [
        "2 jobs, 40 tokens, 2 texts streamed without a gap or a repetition",
        "a worker died with 1 job; the other went on from tokens 4",
        "67% of 30 drafts accepted: a step brings 2.0 tokens a job instead of 1",
    ]


def test_a_text_with_a_gap_is_not_counted_as_whole() -> None:
    jobs = [ended(shown(1)), ended(shown(2))]
    jobs[0].whole = False
    assert "1 texts streamed" in figures(play_of(jobs))[0]


def test_without_drafts_there_is_no_acceptance() -> None:
    assert figures(play_of([ended(shown(1))]))[1:] == ["no drafts were made"]


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
    answer = ended(Shown(2, CONSTRAINED, [(generated, False)], 9))
    lines = figures(play_of([ended(shown(1, generated)), answer]))
    assert ("job 2 wrote JSON that matches its schema" in lines) == valid
    assert not any(line.startswith("job 1 ") for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (132, 43), (240, 70)])
def test_the_panels_of_all_jobs_fit_the_terminal(width: int, height: int) -> None:
    output = io.StringIO()
    screen = Console(file=output, width=width, height=height)
    text = "    a long line\n" * 20 + "    the last"
    jobs = [shown(number, text) for number in range(1, 8)]
    jobs.append(shown(8, text, kind=COPY.kind))
    jobs[0].worker, jobs[0].moved_at = "b", 12

    screen.print(Panels(play_of(jobs), screen).draw())

    text = output.getvalue()
    assert len(text.splitlines()) <= height - 1
    assert max(map(len, text.splitlines())) <= width
    assert text.count("the last") == 8
    assert all(f" {number}: 7 tokens " in text for number in range(1, 8))
    assert " 8: copies its prompt, 7 tokens " in text
    assert " worker b, from token 12 " in text
    assert "worker a: pid 97, 0 jobs   worker b: pid 98, 1 job" in text


def test_accepted_drafts_have_a_colour_of_their_own() -> None:
    output = io.StringIO()
    screen = Console(file=output, force_terminal=True, color_system="standard", width=80, height=24)
    job = Shown(1, Prompt("asked "), [("drafted", True), (" own", False)])

    screen.print(Panels(play_of([job]), screen).draw())

    styles = {
        name: output.getvalue().split(name)[0].rsplit("\x1b", 1)[1]
        for name in ("asked", "drafted", "own")
    }
    assert styles["drafted"] == "[1;32m"
    assert styles["asked"] == "[2m"
    assert styles["own"] == "[0m "


def test_the_panels_move_while_the_jobs_run() -> None:
    output = io.StringIO()
    screen = Console(file=output, force_terminal=True, width=80, height=24)
    job = shown(1)
    wanted = ["first words", "later words"]
    deadline = time.monotonic() + 10.0

    def running() -> bool:
        """Write the next words as soon as the ones before are on the screen."""
        assert time.monotonic() < deadline, "the words were never drawn"
        if job.generated and job.generated not in output.getvalue():
            return True
        job.pieces = [(wanted.pop(0) if wanted else "", False)]
        return bool(job.generated)

    Panels(play_of([job]), screen).follow(running)

    drawn = output.getvalue()
    assert drawn.index("first words") < drawn.index("later words")


def test_the_table_shows_each_row_beside_the_answer_that_has_come() -> None:
    output = io.StringIO()
    calls = {"1": "Package(" + "long" * 30, "2": "Package(two)"}
    Console(file=output, width=60).print(draw(["name"], calls, {"1": {"name": "a-long-name"}}))
    lines = output.getvalue().splitlines()
    assert lines[-2].startswith("Package(long")
    assert lines[-2].rstrip().endswith("a-long-name")
    assert lines[-1].rstrip().endswith("…")


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
    assert all(name in table for name in ("flask", "numpy", "requests"))
    assert "omlx-worker bench" in table
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
