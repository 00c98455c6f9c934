"""``omlx-worker demo``: a server, a worker with the demo model, and prompts side by side."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from omlx_producer.client import Producer
from omlx_producer.protocol import DoneEvent, TerminalEvent, TokensEvent
from omlx_worker.build import connect, make_worker
from omlx_worker.decode.counters import Counters
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.settings import WorkerSettings

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef load_config(path):\n",
    "def test_addition(self):\n",
    "def read_lines(filename):\n    with open(filename) as f:\n",
    "class Node:\n    def __init__(self, value):\n",
    "def main():\n    parser = argparse.ArgumentParser(\n",
    "for name, value in sorted(\n",
)
STAGGER_SECONDS = 0.3
LOAD_SECONDS = 120.0
PANEL_LINES, PANEL_WIDTH = 9, 48


@dataclass(slots=True)
class Shown:
    """A prompt and its text so far."""

    number: int
    prompt: str
    text: str = ""
    tokens: int = 0
    end: TerminalEvent | None = None

    @property
    def failed(self) -> bool:
        return not isinstance(self.end, DoneEvent)


def run_demo(*, max_batch: int, max_tokens: int) -> None:
    """Run the demo. Exits with 1 if a job failed."""
    with (
        tempfile.TemporaryDirectory(prefix="omlx-demo-") as folder,
        EmbeddedRedis(Path(folder)) as server,
    ):
        settings = WorkerSettings(
            model="demo", model_alias="demo", max_batch=max_batch, calibration=False
        )
        worker = _Background(settings, server.url)
        try:
            worker.wait_until_ready()
            shown, seconds = _generate(server.url, max_tokens)
        finally:
            worker.stop()
    tokens = sum(entry.tokens for entry in shown)
    counters = worker.counters
    click.echo(
        f"{len(shown)} jobs, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s, "
        f"mean batch {counters.mean_batch:.1f}, "
        f"{counters.drafts.acceptance:.0%} of drafts accepted"
    )
    for entry in shown:
        if entry.failed:
            click.echo(f"job {entry.number}: {getattr(entry.end, 'error', 'no end')}", err=True)
    if any(entry.failed for entry in shown):
        sys.exit(1)


class _Background:
    """A worker on a thread of this process."""

    def __init__(self, settings: WorkerSettings, url: str) -> None:
        self._connection = connect(url)
        self._worker = make_worker(settings, self._connection)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def counters(self) -> Counters:
        return self._worker.decode_thread.counters

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        with Producer(self._connection) as producer:
            while not producer.models():
                if self._error is not None:
                    raise click.ClickException(str(self._error)) from self._error
                if time.monotonic() > deadline:
                    raise click.ClickException("the model did not load in time")
                time.sleep(0.05)

    def stop(self) -> None:
        self._worker.stop()
        self._thread.join(15.0)
        self._connection.close()

    def _run(self) -> None:
        try:
            self._worker.work(logging_level="WARNING")
        except BaseException as error:  # noqa: BLE001 (shown by the main thread)
            self._error = error


def _generate(url: str, max_tokens: int) -> tuple[list[Shown], float]:
    """Submit the prompts one after another and watch them all."""
    shown = [Shown(number, prompt) for number, prompt in enumerate(PROMPTS, start=1)]
    display = _Panels(shown) if sys.stdout.isatty() else _Lines(shown)
    started = time.monotonic()

    def follow(entry: Shown) -> None:
        time.sleep(STAGGER_SECONDS * (entry.number - 1))
        with Producer(url) as producer:
            job = producer.submit(
                model="demo",
                prompt=entry.prompt,
                max_completion_tokens=max_tokens,
                temperature=0.6,
                seed=entry.number,
            )
            with job.stream() as events:
                for event in events:
                    if isinstance(event, TokensEvent):
                        entry.tokens = event.n
                        entry.text += "".join(choice.text for choice in event.choices)
                    else:
                        entry.end = event

    threads = [threading.Thread(target=follow, args=(entry,), daemon=True) for entry in shown]
    for thread in threads:
        thread.start()
    display.follow(lambda: any(thread.is_alive() for thread in threads))
    return shown, time.monotonic() - started


class _Panels:
    """On a terminal: a panel for each prompt."""

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown

    def follow(self, running: Callable[[], bool]) -> None:
        with Live(get_renderable=self._draw, refresh_per_second=12):
            while running():
                time.sleep(0.05)

    def _draw(self) -> Columns:
        return Columns([self._panel(entry) for entry in self._shown])

    def _panel(self, entry: Shown) -> Panel:
        lines = (entry.prompt + entry.text).splitlines()[-PANEL_LINES:]
        body = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        style = "red" if entry.end and entry.failed else "green" if entry.end else "cyan"
        return Panel(
            body,
            title=f"{entry.number}: {entry.tokens} tokens",
            width=PANEL_WIDTH,
            height=PANEL_LINES + 2,
            border_style=style,
        )


class _Lines:
    """Elsewhere: whole lines as they are complete, after the job's number."""

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown
        self._written = [0] * len(shown)

    def follow(self, running: Callable[[], bool]) -> None:
        while running():
            self._write(to_the_end=False)
            time.sleep(0.05)
        self._write(to_the_end=True)

    def _write(self, *, to_the_end: bool) -> None:
        for index, entry in enumerate(self._shown):
            text = entry.prompt + entry.text if entry.tokens or entry.end else ""
            end = len(text) if to_the_end or entry.end else text.rfind("\n") + 1
            for line in text[self._written[index] : end].splitlines():
                click.echo(f"{entry.number} | {line}")
            self._written[index] = max(self._written[index], end)
