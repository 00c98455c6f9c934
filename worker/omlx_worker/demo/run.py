"""Runs the demo: jobs on two workers, one of which is killed; a table; what to do next."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import redis
from pydantic import BaseModel, Field, ValidationError
from redis.utils import str_if_bytes
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rq.job import Job

from omlx_producer.client.outcome import read_stream_end
from omlx_producer.client.workers import read_workers
from omlx_producer.console import TableConsole
from omlx_producer.environment import PREFIX
from omlx_producer.producer import Producer
from omlx_producer.terminal import counted
from omlx_producer.wire import EndEvent, TokensEvent
from omlx_worker.processes import Child, how_ended, python_command, wait_until
from omlx_worker.queue.embedded import EmbeddedRedis

ALIAS, LEASE_SECONDS = "demo", 3
STEP_SECONDS = 0.1
# So that both workers take some.
STAGGER_SECONDS = 0.1
KILL_AT = 20
"""A worker is killed once each job has this many tokens, or a third of those that it may have."""

TOY = "The model is a toy of 28 MB trained on Python: it shows the machinery, not good text."
NEXT = """
This demo always drafts. A worker of your own drafts where that is faster (--mode auto);
omlx-submit status --json says what it chose, and why.
{}
[bold]    omlx-worker run -m demo --embedded-redis    # a worker that stays; Ctrl-C ends it
    omlx-submit "def fibonacci(n):"             # a job, in a second terminal
    omlx-worker bench -m demo                   # speed here, with and without drafts"""
DRAFTED = "bold green"
COLOURS = {"a": "cyan", "b": "magenta", "": "dim"}
TABLE = [
    *("omlx-submit", "run", "releases.csv", "-o", "table.csv"),
    *("--template", "assert to_json({call}) == ", "--schema", "release.json"),
]


class Release(BaseModel, extra="forbid"):
    version: str = Field(pattern=r"^[0-9]\.[0-9]\.[0-9]$")
    beta: bool


_FIELDS = "    width: int\n    height: int\n"
# The model follows no instruction, but it continues a copy.
_COPY = f"""\
@dataclass
class Box:
{_FIELDS}    depth: int
    color: str = "white"

    def to_dict(self):
        return {{
            "width": self.width,
            "height": self.height,
            "depth": self.depth,
            "color": self.color,
        }}


# The same file, with Box renamed to Crate:

@dataclass
class Crate:
{_FIELDS}"""
_SCHEMA = {"name": "release", "schema": Release.model_json_schema()}
JSON = "JSON by a schema"
PROMPTS: list[tuple[str, str, dict[str, Any]]] = [
    (_COPY, "copies its prompt", {"temperature": 0.0, "stop": "\n\n\n"}),
    (
        "# A release, as JSON:\n",
        JSON,
        {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    ),
    ("def fibonacci(n):\n", "", {}),
    ("class Stack:\n    def __init__(self):\n", "", {}),
    ("def read_lines(filename):\n    with open(filename) as f:\n", "", {}),
    ("class Node:\n    def __init__(self, value):\n", "", {}),
    ("def main():\n    parser = argparse.ArgumentParser(\n", "", {}),
    ("for name, value in sorted(\n", "", {}),
]


def run_demo(max_tokens: int) -> None:
    """Run the demo. Exits with 1 if a job failed.

    Raises:
        ServerError: if no Redis server starts.
        OmlxQueueError: if a job cannot be submitted.
        KeyboardInterrupt: on Ctrl-C, once server and workers have ended.
    """
    console, workers = TableConsole(), dict[str, Worker]()
    console.print(TOY, style="bold", highlight=False)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omlx-demo-")))
        server = stack.enter_context(EmbeddedRedis(folder / "redis"))
        producer = stack.enter_context(Producer(server.url))
        with console.status("two workers load the model ..."):
            for name in "ab":
                workers[name] = Worker(name, server.url, folder)
                stack.push(workers[name].end)
            wait_until_ready(workers, producer.connection)
        jobs, threads = start_jobs(producer, max_tokens)
        show = Show(jobs, workers, producer.connection, min(KILL_AT, max_tokens // 3))
        with drawn(console, lambda: show.draw(*console.size)):
            while any(thread.is_alive() for thread in threads):
                show.look()
                time.sleep(STEP_SECONDS)
        console.print("\n".join(figures(jobs)), highlight=False)
        run_table(console, server.url, folder)
    there = "Next:" if shutil.which("omlx-worker") else "Next, after: . .venv/bin/activate"
    console.print(NEXT.format(there), highlight=False, soft_wrap=True)
    failed = [job for job in jobs if job.failed]
    for job in failed:
        click.echo(f"job {job.number}: {getattr(job.end, 'error', 'no end')}", err=True)
    if failed:
        sys.exit(1)


@contextlib.contextmanager
def drawn(console: Console, frame: Callable[[], RenderableType]) -> Iterator[None]:
    """Draw the frame of each moment; in a pipe the last one alone."""
    with Live(console=console, get_renderable=frame):
        yield
    if not console.is_terminal:
        console.line()


class Worker:
    """``omlx-worker run`` with the demo model, as a child, so that it can be killed."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        self._name = name
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(PREFIX)
        }
        options = {
            **{"model": "demo", "model-alias": ALIAS, "name": name, "redis-url": url},
            # The demo shows drafts, also where they do not pay.
            **{"mode": "mtp", "max-batch": len(PROMPTS), "lease-seconds": LEASE_SECONDS},
            **{"state-dir": folder, "redis-grace": 10},
        }
        with (folder / f"{name}.log").open("wb") as output:
            self._child = Child(
                python_command("omlx_worker.cli", "omlx-worker", "run")
                + [f"--{key}={value}" for key, value in options.items()],
                output,
                seconds=0,
                cwd=folder,
                env=environment,
            )
        self.pid = self._child.pid

    def require_running(self) -> None:
        """End the demo with the last line of this worker's log if it has ended by itself."""
        if (code := self._child.code) is not None:
            raise click.ClickException(
                f"worker {self._name} {how_ended(code)}: {self._child.last_line}"
            )

    def kill(self) -> None:
        """End it at once, as a crash would. Returns when it is gone."""
        self._child.end()

    def end(self, error: type[BaseException] | None, *_: object) -> None:
        """Ask it to end; after an error, kill it."""
        self._child.end(*([] if error else [3.0]))


def wait_until_ready(workers: dict[str, Worker], connection: redis.Redis) -> None:
    def all_serve() -> bool:
        found = read_workers(connection, ALIAS)
        return workers.keys() <= {worker.name for worker in found if not worker.is_loading}

    def all_run() -> None:
        for worker in workers.values():
            worker.require_running()

    wait_until(all_serve, all_run)


@dataclass
class Shown:
    """A job on the screen.

    Attributes:
        job_id: empty until it is submitted.
        pieces: its text in parts, each with whether accepted drafts wrote it.
        worker: the name of the worker that runs it, or ran it; empty while it waits.
        moved_at: its tokens when its worker was killed; None if it has had one worker.
        whole: whether the text that was streamed is that of the result.
    """

    number: int
    job_id: str = ""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    tokens: int = 0
    worker: str = ""
    moved_at: int | None = None
    end: EndEvent | None = None
    whole: bool = False

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def failed(self) -> bool:
        return self.end is None or not self.end.end.ok

    def run(self, producer: Producer, request: dict[str, Any]) -> None:
        """Submit the request after those of the jobs before it, and take its events."""
        time.sleep(STAGGER_SECONDS * (self.number - 1))
        job = producer.submit(request)
        self.job_id = job.id
        with job.stream() as events:
            for event in events:
                if isinstance(event, TokensEvent):
                    self.take(event)
                else:
                    self.end = event
        self.whole = not self.failed and job.result().text == self.text

    def take(self, event: TokensEvent) -> None:
        """Add an event's text, drafted parts apart."""
        [delta] = event.choices
        at = 0
        for start, end in delta.drafted or ():
            self.pieces += [(delta.text[at:start], False), (delta.text[start:end], True)]
            at = end
        self.pieces.append((delta.text[at:], False))
        self.tokens = event.n


def start_jobs(producer: Producer, max_tokens: int) -> tuple[list[Shown], list[threading.Thread]]:
    """Run each prompt in a thread of its own."""
    jobs, threads = [], []
    for number, (text, _, fields) in enumerate(PROMPTS, start=1):
        request = {"model": ALIAS, "max_completion_tokens": max_tokens, "temperature": 0.6}
        request |= {"seed": number, "prompt": text, **fields}
        jobs.append(Shown(number))
        threads.append(threading.Thread(target=jobs[-1].run, args=(producer, request), daemon=True))
        threads[-1].start()
    return jobs, threads


class Show:
    """The jobs, a panel each, and the crash in the middle.

    Args:
        kill_at: tokens of each job, at which a worker is killed.

    Attributes:
        notice: what has just happened, one sentence; empty before the kill.
    """

    def __init__(
        self, jobs: list[Shown], workers: dict[str, Worker], connection: redis.Redis, kill_at: int
    ) -> None:
        self.notice = ""
        self._jobs = jobs
        self._workers = workers
        self._connection = connection
        self._kill_at = kill_at
        self._victim = ""

    def look(self) -> None:
        """Ask Redis who runs what, and kill a worker when it is time.

        Raises:
            click.ClickException: if a worker has ended by itself.
        """
        running = [job for job in self._jobs if not job.end]
        submitted = [job for job in running if job.job_id]
        with self._connection.pipeline() as pipe:
            for job in submitted:
                pipe.hget(Job.key_for(job.job_id), "worker_name")
            for job, name in zip(submitted, pipe.execute(), strict=True):
                holder = str_if_bytes(name or b"")
                job.worker = "" if holder == self._victim else holder
        if self._victim:
            if all(job.worker for job in running):
                [left] = self._workers
                self.notice = f"worker {left} goes on with them, each from its last token"
        elif running and all(job.tokens >= self._kill_at for job in running):
            self._kill(running)
        for worker in self._workers.values():
            worker.require_running()

    def _kill(self, running: list[Shown]) -> None:
        """Kill the worker with the most jobs."""
        holders = [job.worker for job in running if job.worker]
        self._victim = max(self._workers, key=holders.count)
        worker = self._workers.pop(self._victim)
        worker.kill()
        moved = [job for job in running if job.worker == self._victim]
        for job in moved:
            job.worker, job.moved_at = "", read_stream_end(self._connection, job.job_id)[0]
        self.notice = (
            f"kill -9 {worker.pid}: worker {self._victim} is dead, with "
            f"{counted(len(moved), 'job')}; its lease ends in {LEASE_SECONDS} s"
        )

    def draw(self, width: int, height: int) -> RenderableType:
        """The frame of this moment, no higher than the terminal if that has 80 by 24."""
        columns = min(4, max(1, width // 38))
        rows = -(-len(self._jobs) // columns)
        # Two lines are below the panels, and one stays free for the cursor.
        panel = min(60, width // columns), min(11, max(3, (height - 3) // rows))
        grid = Table.grid()
        for start in range(0, len(self._jobs), columns):
            grid.add_row(*(draw_job(job, *panel) for job in self._jobs[start : start + columns]))
        return Group(grid, self._draw_workers(), self._draw_notice())

    def _draw_workers(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        for name, worker in self._workers.items():
            count = sum(job.worker == name and not job.end for job in self._jobs)
            jobs = counted(count, "job")
            line.append(f"worker {name}: pid {worker.pid}, {jobs}   ", COLOURS[name])
        if self._victim:
            line.append(f"worker {self._victim}: killed", "bold red")
        return line

    def _draw_notice(self) -> Text:
        if self.notice:
            return Text(self.notice, "bold yellow", no_wrap=True, overflow="ellipsis")
        return Text.assemble("dim: prompt, plain: the model, ", ("green: accepted drafts", DRAFTED))


def draw_job(job: Shown, width: int, height: int) -> Panel:
    """A panel with the last lines of a job's text."""
    prompt, kind, _ = PROMPTS[job.number - 1]
    text = Text().append(prompt, "dim")
    for piece, drafted in list(job.pieces):
        text.append(piece, DRAFTED if drafted else "")
    place, border = f"worker {job.worker}" if job.worker else "", COLOURS[job.worker]
    if job.moved_at is not None:
        if job.worker:
            place += f", from token {job.moved_at}"
        else:
            place, border = "its worker was killed", "bold red"
    if job.end:
        border = "red" if job.failed else "green"
    lines = text.split("\n", allow_blank=False)[2 - height :]
    return Panel(
        Text("\n", no_wrap=True, overflow="ellipsis").join(lines),
        title=f"{job.number}: {kind and f'{kind}, '}{counted(job.tokens, 'token')}",
        subtitle=place,
        width=width,
        height=height,
        border_style=border,
    )


def figures(jobs: list[Shown]) -> list[str]:
    """The outcome of the jobs in words: the crash, the drafts, and the constrained answer."""
    usages = [job.end.usage for job in jobs if job.end and not job.failed]
    tokens = sum(usage.completion_tokens for usage in usages)
    whole = sum(job.whole for job in jobs)
    lines = [
        f"{counted(len(usages), 'job')}, {counted(tokens, 'token')}, "
        f"{whole} texts streamed without a gap or a repetition"
    ]
    if places := [str(job.moved_at) for job in jobs if job.moved_at is not None]:
        moved = counted(len(places), "job")
        lines.append(
            f"a worker died with {moved}; the other went on from tokens {', '.join(places)}"
        )
    drafts = [usage.speculation for usage in usages]
    if drafted := sum(draft.drafted for draft in drafts):
        accepted = sum(sum(draft.accepted) for draft in drafts)
        per_step = 1 + accepted / sum(draft.steps for draft in drafts)
        lines.append(
            f"{accepted / drafted:.0%} of {counted(drafted, 'draft')} accepted: "
            f"a step brings {per_step:.1f} tokens a job instead of 1"
        )
    for job in jobs:
        if PROMPTS[job.number - 1][1] == JSON:
            with contextlib.suppress(ValidationError):
                Release.model_validate_json(job.text, strict=True)
                lines.append(f"job {job.number} wrote JSON that matches its schema")
    return lines


def run_table(console: Console, url: str, folder: Path) -> None:
    """Run the command that makes a table of a CSV, and show its rows as they end.

    Raises:
        click.ClickException: with the last line of the command, if it fails.
    """
    for name in ("releases.csv", "release.json"):
        (folder / name).write_bytes(files("omlx_worker.demo").joinpath("data", name).read_bytes())
    console.print(f"\n$ {shlex.join(TABLE)}", style="bold", markup=False, highlight=False)
    command = python_command("omlx_producer.cli.main", *TABLE)
    with (folder / "run.log").open("wb") as log:
        run = Child([*command, "--redis-url", url, "--progress=none"], log, seconds=0, cwd=folder)
    try:
        with drawn(console, lambda: draw_table(folder)):
            code = run.wait()
    finally:
        run.end()
    if code:
        raise click.ClickException(f"omlx-submit run {how_ended(code)}: {run.last_line}")


def draw_table(folder: Path) -> Table:
    """The input's texts and, beside them, the answers that the run has written so far."""
    answers = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "table.csv.jsonl").read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                [choice] = row["response"]["body"]["choices"]
                answers[row["custom_id"]] = json.loads(choice["message"]["content"])
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("call", style="dim")
    columns = json.loads((folder / "release.json").read_text())["properties"]
    for column in columns:
        table.add_column(column, no_wrap=True, min_width=10, style="green")
    with (folder / "releases.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            answer = answers.get(row["id"], {})
            # Only a column that may wrap makes room for the others.
            call = Text(row["call"], no_wrap=True, overflow="ellipsis")
            table.add_row(call, *(str(answer.get(column, "…")) for column in columns))
    return table
