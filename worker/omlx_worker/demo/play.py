"""What the demo shows: jobs, the workers that run them, and the crash in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field

from redis.utils import str_if_bytes
from rq.job import Job

from omlx_producer.producer import Producer
from omlx_producer.terminal import counted
from omlx_producer.wire import DoneEvent, TerminalEvent, TokensEvent, events_key
from omlx_worker.demo.crew import LEASE_SECONDS, Crew
from omlx_worker.demo.prompts import Prompt


@dataclass(slots=True)
class Shown:
    """A prompt and the text generated so far.

    Attributes:
        pieces: the text in parts, each with whether accepted drafts wrote it.
        job_id: empty until it is submitted.
        worker: the name of the worker that runs it, or ran it; empty while it waits.
        moved_at: its tokens when its worker was killed; None if it has had one worker.
        whole: whether the text that was streamed is that of the result.
    """

    number: int
    prompt: Prompt
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    tokens: int = 0
    job_id: str = ""
    worker: str = ""
    moved_at: int | None = None
    end: TerminalEvent | None = None
    whole: bool = False

    @property
    def title(self) -> str:
        kind = f"{self.prompt.kind}, " if self.prompt.kind else ""
        return f"{self.number}: {kind}{counted(self.tokens, 'token')}"

    @property
    def place(self) -> str:
        """Which worker has it, in words."""
        if self.moved_at is None:
            return f"worker {self.worker}" if self.worker else ""
        if not self.worker:
            return "its worker was killed"
        return f"worker {self.worker}, from token {self.moved_at}"

    @property
    def generated(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def text(self) -> str:
        return self.prompt.text + self.generated

    @property
    def failed(self) -> bool:
        return not isinstance(self.end, DoneEvent)

    def take(self, event: TokensEvent) -> None:
        """Add an event's text, drafted parts apart."""
        [delta] = event.choices
        at = 0
        for start, end in delta.drafted or ():
            self.pieces += [(delta.text[at:start], False), (delta.text[start:end], True)]
            at = end
        self.pieces.append((delta.text[at:], False))
        self.tokens = event.n


class Play:
    """The jobs on their workers. Kills a worker once enough tokens have come.

    Args:
        kill_at: tokens of all jobs together.

    Attributes:
        notice: what has just happened, one sentence; empty before the kill.
        moved: the jobs that the killed worker ran.
    """

    def __init__(self, shown: list[Shown], crew: Crew, producer: Producer, kill_at: int) -> None:
        self.shown = shown
        self.crew = crew
        self.notice = ""
        self.moved: list[Shown] = []
        self._producer = producer
        self._kill_at = kill_at
        self._victim = ""

    def look(self) -> None:
        """Ask Redis who runs what, and kill a worker when it is time.

        Raises:
            click.ClickException: if a worker has ended by itself.
        """
        self.crew.require_running()
        running = [entry for entry in self.shown if entry.job_id and not entry.end]
        self._ask_workers(running)
        if not self._victim and sum(entry.tokens for entry in self.shown) >= self._kill_at:
            self._kill(running)
        elif self.moved and all(entry.worker or entry.end for entry in self.moved):
            [left] = self.crew.members
            self.notice = f"worker {left.name} goes on with them, each from its last token"

    def _ask_workers(self, running: list[Shown]) -> None:
        with self._producer.connection.pipeline() as pipe:
            for entry in running:
                pipe.hget(Job.key_for(entry.job_id), "worker_name")
            names = pipe.execute()
        for entry, name in zip(running, names, strict=True):
            worker = str_if_bytes(name or b"")
            entry.worker = "" if worker == self._victim else worker

    def _kill(self, running: list[Shown]) -> None:
        """Kill the worker with the most jobs."""
        by_worker = {
            member.name: [entry for entry in running if entry.worker == member.name]
            for member in self.crew.members
        }
        name = max(by_worker, key=lambda name: len(by_worker[name]))
        if not by_worker[name]:
            return
        victim = self.crew.kill(name)
        self._victim, self.moved = name, by_worker[name]
        for entry in self.moved:
            entry.worker, entry.moved_at = "", self._published(entry)
        self.notice = (
            f"kill -9 {victim.pid}: worker {name} is dead, with {counted(len(self.moved), 'job')}; "
            f"its lease ends in {LEASE_SECONDS} s"
        )

    def _published(self, entry: Shown) -> int:
        """Tokens of a job in Redis. Its next worker goes on from there."""
        last = self._producer.connection.xrevrange(events_key(entry.job_id), count=1)
        return int(str_if_bytes(last[0][0] or b"0").partition("-")[0]) if last else 0
