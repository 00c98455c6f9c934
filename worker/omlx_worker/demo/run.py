"""Runs the demo: jobs that draft, on the screen; then the speed with and without drafts."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from omlx_producer.client import Producer
from omlx_producer.protocol import DoneEvent, TokensEvent
from omlx_producer.wording import counted
from omlx_worker.build import connect, make_worker
from omlx_worker.decode.counters import Counters, DraftCounts
from omlx_worker.demo.display import Shown, follow
from omlx_worker.demo.prompts import CONSTRAINED, PROMPTS, is_release
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.settings import WorkerSettings

STAGGER_SECONDS = 0.3
LOAD_SECONDS = 120.0
LAP_SECONDS = 120.0
STOP_SECONDS = 15.0
AT_ONCE_SECONDS = 2.0
# In shorter laps most steps would be those in which rows join.
WARM_UP_TOKENS, MEASURED_TOKENS = 8, 64


def run_demo(*, max_batch: int, max_tokens: int) -> None:
    """Run the demo. Exits with 1 if a job failed.

    Raises:
        ServerError: if no Redis server starts.
        OmlxQueueError: if a job whose speed is measured has no result.
        KeyboardInterrupt: on Ctrl-C, once the server has ended.
    """
    settings = WorkerSettings(
        model="demo",
        model_alias="demo",
        max_batch=max_batch,
        mode="mtp",
        calibration=False,
        # The jobs that are measured have run before: a ring would hold their answers.
        lookup_ring=0,
    )
    with tempfile.TemporaryDirectory(prefix="omlx-demo-") as folder:
        _say("starting Redis ...")
        with EmbeddedRedis(Path(folder)) as server:
            _say("loading the demo model ...")
            worker = _Background(settings, server.url)
            try:
                worker.wait_until_ready()
                with _unfused_on_a_cpu():
                    _show_and_measure(server.url, worker.counters, max_tokens)
            except BaseException:
                worker.stop(at_once=True)
                raise
            worker.stop()


def _say(what: str) -> None:
    click.echo(what, err=True)


def _unfused_on_a_cpu() -> AbstractContextManager[None]:
    """There the compiler takes most of a minute for a model that gains nothing from it."""
    import mlx.core as mx

    from omlx_worker.engine.kernels.device import unfused

    return unfused() if mx.default_device() == mx.cpu else nullcontext()


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

    def stop(self, *, at_once: bool = False) -> None:
        """Finish the jobs, or give them back."""
        self._worker.stop()
        if at_once:
            self._worker.stop()
        self._thread.join(AT_ONCE_SECONDS if at_once else STOP_SECONDS)
        self._connection.close()

    def _run(self) -> None:
        try:
            self._worker.work(logging_level="WARNING")
        except BaseException as error:  # noqa: BLE001 (shown by the main thread)
            self._error = error


def _show_and_measure(url: str, counters: Counters, max_tokens: int) -> None:
    shown, seconds = _generate(url, max_tokens)
    for line in figures(shown, seconds, counters):
        click.echo(line)
    failed = [entry for entry in shown if entry.failed]
    for entry in failed:
        _say(f"job {entry.number}: {getattr(entry.end, 'error', 'no end')}")
    if failed:
        sys.exit(1)
    if not counters.drafts.drafted:
        return
    _say("measuring with and without drafts ...")
    with Producer(url) as producer:
        # Alone, the last: it continues with code, as most prompts do.
        everyone = range(len(PROMPTS))
        for jobs in (everyone, everyone[-1:]):
            speeds = {}
            for tokens in (WARM_UP_TOKENS, MEASURED_TOKENS):
                for draft in (True, False):
                    speeds[draft] = _speed(producer, jobs, min(tokens, max_tokens), draft=draft)
            who = "1 job alone" if len(jobs) == 1 else f"{len(jobs)} jobs at once"
            click.echo(
                f"{who}: {speeds[True]:.0f} tokens/s with drafts, {speeds[False]:.0f} without"
            )
    click.echo("omlx-worker run measures this too and drafts where it is faster (--mode auto)")


def figures(shown: list[Shown], seconds: float, counters: Counters) -> list[str]:
    """The outcome of the jobs in words: their speed, their drafts, and the constrained answer."""
    ends = [entry.end for entry in shown if isinstance(entry.end, DoneEvent)]
    tokens = sum(end.usage.completion_tokens for end in ends)
    lines = [
        f"{counted(len(ends), 'job')}, {counted(tokens, 'token')} in {seconds:.1f} s: "
        f"{tokens / seconds:.0f} tokens/s, "
        f"mean batch {counters.mean_batch:.1f}",
        *_drafts(counters.drafts, tokens),
    ]
    return lines + [
        f"job {entry.number} wrote JSON that matches its schema"
        for entry in shown
        if entry.prompt is CONSTRAINED and is_release(entry.generated)
    ]


def _drafts(drafts: DraftCounts, tokens: int) -> list[str]:
    if not drafts.drafted:
        return ["no drafts were made"]
    return [
        f"{drafts.acceptance:.0%} of {counted(drafts.drafted, 'draft')} accepted: a step brings "
        f"{tokens / drafts.steps:.1f} tokens a job instead of 1",
        f"{drafts.looked_up} of these drafts were looked up, each in its job's own text",
    ]


def _request(index: int, max_tokens: int) -> dict[str, Any]:
    prompt = PROMPTS[index]
    return {
        "model": "demo",
        "prompt": prompt.text,
        "max_completion_tokens": max_tokens,
        "temperature": 0.6,
        "seed": index + 1,
    } | prompt.fields


def _generate(url: str, max_tokens: int) -> tuple[list[Shown], float]:
    """Submit the prompts one after another and show them all."""
    shown = [Shown(number, prompt) for number, prompt in enumerate(PROMPTS, start=1)]
    started = time.monotonic()

    def stream(entry: Shown) -> None:
        time.sleep(STAGGER_SECONDS * (entry.number - 1))
        with Producer(url) as producer:
            job = producer.submit(_request(entry.number - 1, max_tokens))
            with job.stream() as events:
                for event in events:
                    if isinstance(event, TokensEvent):
                        entry.tokens = event.n
                        entry.generated += "".join(choice.text for choice in event.choices)
                    else:
                        entry.end = event

    threads = [threading.Thread(target=stream, args=(entry,), daemon=True) for entry in shown]
    for thread in threads:
        thread.start()
    follow(shown, lambda: any(thread.is_alive() for thread in threads))
    return shown, time.monotonic() - started


def _speed(producer: Producer, jobs: range, max_tokens: int, *, draft: bool) -> float:
    """Tokens a second of some of the prompts, submitted at once."""
    began = time.monotonic()
    requests = [_request(index, max_tokens) | {"draft": draft} for index in jobs]
    results = [job.result(LAP_SECONDS) for job in producer.submit_many(requests)]
    tokens: int = sum(result["usage"]["completion_tokens"] for result in results)
    return tokens / (time.monotonic() - began)
