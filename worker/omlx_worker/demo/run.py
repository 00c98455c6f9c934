"""Runs the demo: jobs on two workers, one of which is killed; a table; what to do next."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from omlx_producer.cli.overview import TableConsole
from omlx_producer.producer import JobHandle, Producer
from omlx_producer.terminal import counted
from omlx_producer.wire import DoneEvent, TokensEvent
from omlx_worker.demo.crew import ALIAS, Crew
from omlx_worker.demo.display import follow
from omlx_worker.demo.play import Play, Shown
from omlx_worker.demo.prompts import CONSTRAINED, PROMPTS, is_release
from omlx_worker.demo.table import run_table
from omlx_worker.queue.embedded import EmbeddedRedis

STAGGER_SECONDS = 0.2
RESULT_SECONDS = 30.0
KILL_AT = 0.3
"""The share of the most tokens that the jobs may have, after which a worker is killed."""

TOY = "The model is a toy of 28 MB trained on Python: it shows the machinery, not good text."


def run_demo(*, max_batch: int, max_tokens: int) -> None:
    """Run the demo. Exits with 1 if a job failed.

    Raises:
        ServerError: if no Redis server starts.
        OmlxQueueError: if a job cannot be submitted.
        KeyboardInterrupt: on Ctrl-C, once server and workers have ended.
    """
    console = TableConsole()
    console.print(TOY, style="bold", highlight=False)
    with tempfile.TemporaryDirectory(prefix="omlx-demo-") as name:
        folder = Path(name)
        server = EmbeddedRedis(folder / "redis")
        with _waiting(console, "starting Redis ..."):
            server.start()
        try:
            with (
                Crew("ab", server.url, folder, max_batch) as crew,
                Producer(server.url) as producer,
            ):
                with _waiting(console, "two workers load the model ..."):
                    crew.wait_until_ready(producer.connection)
                play = _stream(producer, crew, server.url, max_tokens)
                for line in figures(play):
                    console.print(line, highlight=False)
                run_table(console, server.url, folder)
        finally:
            server.stop()
    for line in _next():
        style = "bold" if line.startswith(" ") else ""
        console.print(line, style=style, highlight=False, soft_wrap=True)
    failed = [entry for entry in play.shown if entry.failed]
    for entry in failed:
        click.echo(f"job {entry.number}: {getattr(entry.end, 'error', 'no end')}", err=True)
    if failed:
        sys.exit(1)


@contextmanager
def _waiting(console: Console, what: str) -> Iterator[None]:
    """Say what the demo waits for; on a terminal with something that moves."""
    if not console.is_terminal:
        click.echo(what, err=True)
        yield
        return
    with console.status(what):
        yield


def _stream(producer: Producer, crew: Crew, url: str, max_tokens: int) -> Play:
    """Submit the prompts one after another and show them all, and the crash."""
    shown = [Shown(number, prompt) for number, prompt in enumerate(PROMPTS, start=1)]
    play = Play(shown, crew, producer, kill_at=int(KILL_AT * len(shown) * max_tokens))

    def stream(entry: Shown) -> None:
        time.sleep(STAGGER_SECONDS * (entry.number - 1))
        with Producer(url) as own:
            job = own.submit(_request(entry.number - 1, max_tokens))
            entry.job_id = job.id
            _take(entry, job)

    threads = [threading.Thread(target=stream, args=(entry,), daemon=True) for entry in shown]
    for thread in threads:
        thread.start()

    def running() -> bool:
        play.look()
        return any(thread.is_alive() for thread in threads)

    follow(play, running)
    return play


def _take(entry: Shown, job: JobHandle) -> None:
    with job.stream() as events:
        for event in events:
            if isinstance(event, TokensEvent):
                entry.take(event)
            else:
                entry.end = event
    entry.whole = not entry.failed and job.result(RESULT_SECONDS).text == entry.generated


def _request(index: int, max_tokens: int) -> dict[str, Any]:
    prompt = PROMPTS[index]
    return {
        "model": ALIAS,
        "prompt": prompt.text,
        "max_completion_tokens": max_tokens,
        "temperature": 0.6,
        "seed": index + 1,
    } | prompt.fields


def figures(play: Play) -> list[str]:
    """The outcome of the jobs in words: the crash, the drafts, and the constrained answer."""
    ends = [entry.end for entry in play.shown if isinstance(entry.end, DoneEvent)]
    tokens = sum(end.usage.completion_tokens for end in ends)
    whole = sum(entry.whole for entry in play.shown)
    lines = [
        f"{counted(len(ends), 'job')}, {counted(tokens, 'token')}, "
        f"{whole} texts streamed without a gap or a repetition"
    ]
    if play.moved:
        places = ", ".join(str(entry.moved_at) for entry in play.moved)
        jobs = counted(len(play.moved), "job")
        lines.append(f"a worker died with {jobs}; the other went on from tokens {places}")
    lines += _drafts(ends)
    return lines + [
        f"job {entry.number} wrote JSON that matches its schema"
        for entry in play.shown
        if entry.prompt is CONSTRAINED and is_release(entry.generated)
    ]


def _drafts(ends: list[DoneEvent]) -> list[str]:
    """How drafts fared, of the worker that ended each job."""
    each = [end.usage.speculation for end in ends]
    steps, drafted = sum(one.steps for one in each), sum(one.drafted for one in each)
    if not drafted:
        return ["no drafts were made"]
    accepted = sum(sum(one.accepted) for one in each)
    return [
        f"{accepted / drafted:.0%} of {counted(drafted, 'draft')} accepted: "
        f"a step brings {1 + accepted / steps:.1f} tokens a job instead of 1"
    ]


def _next() -> list[str]:
    """The next three commands."""
    on_path = shutil.which("omlx-worker") is not None
    return [
        "",
        "This demo always drafts. A worker of your own drafts where that is faster (--mode auto);",
        "omlx-submit status --json says what it chose, and why.",
        "Next:" if on_path else "Next, after: . .venv/bin/activate",
        "    omlx-worker run -m demo --embedded-redis    # a worker that stays; Ctrl-C ends it",
        '    omlx-submit "def fibonacci(n):"             # a job, in a second terminal',
        "    omlx-worker bench                           # speed here, with and without drafts",
    ]
