"""The demo: what it says, its panels, and how it ends."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from rich.console import Console

from omlx_producer.protocol import DoneEvent, Usage
from omlx_worker import build, cli
from omlx_worker.decode.counters import Counters, DraftCounts
from omlx_worker.demo import run
from omlx_worker.demo.display import Panels, Shown
from omlx_worker.demo.prompts import CONSTRAINED, COPY, PROMPTS, Prompt
from omlx_worker.demo.run import _unfused_on_a_cpu, figures
from omlx_worker.engine.kernels.device import compiles
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import FakeEngine


def shown(number: int, generated: str = "", tokens: int = 7, kind: str = "") -> Shown:
    return Shown(number, Prompt(f"def prompt_{number}():\n", kind), generated, tokens)


def ended(entry: Shown) -> Shown:
    usage = Usage(prompt_tokens=5, completion_tokens=entry.tokens, total_tokens=5 + entry.tokens)
    entry.end = DoneEvent(job_id="j", n=entry.tokens, finish_reasons=["length"], usage=usage)
    return entry


def test_the_demo_says_what_it_waits_for_and_shows_every_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(settings: WorkerSettings) -> FakeEngine:
        return FakeEngine(settings.max_batch, step_seconds=0.001)

    monkeypatch.setattr(build, "load_engine", load)
    monkeypatch.setattr(run, "STAGGER_SECONDS", 0.0)
    result = CliRunner().invoke(cli.main, ["demo", "--max-tokens", "30"])
    logging.getLogger().setLevel(logging.WARNING)

    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == ["starting Redis ...", "loading the demo model ..."]
    lines = result.stdout.splitlines()
    for number in range(1, len(PROMPTS) + 1):
        assert any(line.startswith(f"{number} | ") for line in lines)
    assert lines[-2].startswith(f"{len(PROMPTS)} jobs, ")
    assert lines[-1] == "no drafts were made"


def test_the_figures_tell_speed_acceptance_and_lookups() -> None:
    drafts = DraftCounts(steps=20, drafted=30, accepted=[15, 5], looked_up=9)
    counters = Counters(steps=10, rows=15, drafts=drafts)
    jobs = [ended(shown(1, tokens=30)), ended(shown(2, tokens=10))]
    assert figures(jobs, 2.0, counters) == [
        "2 jobs, 40 tokens in 2.0 s: 20 tokens/s, mean batch 1.5",
        "67% of 30 drafts accepted: a step brings 2.0 tokens a job instead of 1",
        "9 of these drafts were looked up, each in its job's own text",
    ]


def test_without_drafts_there_is_no_acceptance() -> None:
    assert figures([ended(shown(1))], 2.0, Counters(steps=7, rows=7))[1:] == ["no drafts were made"]


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
    answer = ended(Shown(2, CONSTRAINED, generated, 9))
    lines = figures([ended(shown(1, generated)), answer], 2.0, Counters())
    assert ("job 2 wrote JSON that matches its schema" in lines) == valid
    assert not any(line.startswith("job 1 ") for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (132, 43), (240, 70)])
def test_the_panels_of_all_jobs_fit_the_terminal(width: int, height: int) -> None:
    output = io.StringIO()
    screen = Console(file=output, width=width, height=height)
    text = "    a long line\n" * 20 + "    the last"
    jobs = [shown(number, text) for number in range(1, 8)]
    jobs.append(shown(8, text, kind=COPY.kind))

    screen.print(Panels(jobs, screen).draw())

    text = output.getvalue()
    assert len(text.splitlines()) <= height - 2
    assert max(map(len, text.splitlines())) <= width
    assert text.count("the last") == 8
    assert all(f" {number}: 7 tokens " in text for number in range(1, 8))
    assert " 8: copies its prompt, 7 tokens " in text


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
        job.generated = wanted.pop(0) if wanted else ""
        return bool(job.generated)

    Panels([job], screen).follow(running)

    drawn = output.getvalue()
    assert drawn.index("first words") < drawn.index("later words")


def test_steps_are_unfused_on_a_cpu_only_and_only_within_the_demo() -> None:
    before = compiles()
    with _unfused_on_a_cpu():
        assert compiles() == (before and mx.default_device() != mx.cpu)
    assert compiles() == before


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
            [command, "demo", "--max-tokens", "8"],
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
def test_the_demo_drafts_compares_and_builds_no_kernels(terminal: Terminal, tmp_path: Path) -> None:
    terminal.read()
    assert terminal.process.wait() == 0, terminal.output
    assert "drafts accepted" in terminal.output
    assert "drafts were looked up" in terminal.output
    assert "8 jobs at once: " in terminal.output
    assert "1 job alone: " in terminal.output
    if mx.default_device() == mx.cpu:
        assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading the demo model", "3: 8 tokens", "measuring"])
def test_ctrl_c_ends_the_demo_with_130_and_without_a_traceback(
    terminal: Terminal, tmp_path: Path, moment: str
) -> None:
    terminal.read(until=moment)
    terminal.press_ctrl_c()
    terminal.read()
    assert terminal.process.wait() == 130, terminal.output
    assert "Traceback" not in terminal.output
    assert list(tmp_path.glob("omlx-demo-*")) == []
