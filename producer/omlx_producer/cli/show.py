"""Shows a job that a command waits for: its text; on stderr, why it shows none."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, Self

import redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes
from rq.job import Job

from omlx_producer.client.chunks import ChatChunks
from omlx_producer.client.outcome import WAITING
from omlx_producer.errors import InvalidRequest
from omlx_producer.figures import queue_key, read_figures
from omlx_producer.outage import RECONNECT_SECONDS, passes
from omlx_producer.producer import Producer
from omlx_producer.program import program_name
from omlx_producer.terminal import counted, without_counts, write
from omlx_producer.wire import (
    PRIORITIES,
    Completion,
    EndEvent,
    JobEvent,
    TokensEvent,
    answer_text,
    read_queue_name,
)
from omlx_producer.wire.keys import WIRE_FIELD, read_version

SILENT_SECONDS = 3.0


AWAY = f"Redis is away; trying again for up to {RECONNECT_SECONDS:g} s"


class WaitReasons:
    """Looks at a job after `SILENT_SECONDS` without an event, from its own thread.

    It prints a line if the reason has changed. A changed number alone prints none.
    """

    def __init__(self, connection: redis.Redis, job_id: str) -> None:
        self._connection = connection
        self._job_id = job_id
        self._program = program_name()
        self._heard, self._over = threading.Event(), threading.Event()
        self._line_break = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        # A call to a server that is away may take longer.
        self._thread.join(1.0)

    def heard(self) -> None:
        """An event of the job came."""
        self._heard.set()

    def _watch(self) -> None:
        said = None
        while not self._over.wait(SILENT_SECONDS):
            if self._heard.is_set():
                self._heard.clear()
                # The text on a terminal may end within a line.
                said, self._line_break = None, "\n" if sys.stdout.isatty() else ""
                continue
            try:
                reason = wait_reason(self._connection, self._job_id)
            except RedisError as error:
                if not passes(error):
                    return
                reason = AWAY
            if self._heard.is_set() or self._over.is_set():
                continue
            about = reason and without_counts(reason)
            if reason is not None and about != said:
                write(f"{self._line_break}{self._program}: {reason}\n", err=True)
            said = about


def wait_reason(connection: redis.Redis, job_id: str) -> str | None:
    """Why a job shows nothing; None if it runs, has ended, or is none of this package's."""
    key = Job.key_for(job_id)
    queue = str_if_bytes(connection.hget(key, "origin") or "")
    if (found := read_queue_name(queue)) is None:
        return None
    alias, priority = found
    better = PRIORITIES[: PRIORITIES.index(priority)]
    with connection.pipeline(transaction=False) as pipe:
        pipe.hget(key, "status")
        pipe.lpos(queue_key(queue), job_id)
        pipe.hget(key, WIRE_FIELD)
        status, ahead, version = pipe.execute()
    if status not in (*WAITING, b"started"):
        return None
    if status not in (b"queued", b"started"):
        return f"RQ holds the job back: it is {str_if_bytes(status)}"
    [model] = read_figures(connection, alias)
    if status == b"started" and model.workers:
        return None
    if told := model.held_up or model.too_new("the job", read_version(version)):
        return told
    if jobs := (ahead or 0) + sum(model.queues[each].waiting for each in better):
        return f"waiting behind {counted(jobs, 'job')}"
    return f"the job is the next that a worker of {alias} takes"


class TextWriter:
    """Prints the first choice as it comes, and the others whole after it.

    A terminal also shows the thinking of the first choice, on stderr.
    """

    def __init__(self, job_id: str = "") -> None:
        self._chunks = ChatChunks(job_id, "")
        self._others: dict[int, list[str]] = {}
        self._at_line_start = True
        self._thinks = False

    def write(self, event: JobEvent) -> None:
        for chunk in self._chunks.take(event):
            [choice] = chunk["choices"]
            delta = choice["delta"]
            text = answer_text({"message": {"content": None, **delta}})
            if choice["index"] and text:
                self._others.setdefault(choice["index"], []).append(text)
            elif not choice["index"]:
                self._think(delta.get("reasoning_content", ""), bool(text))
                if "tool_calls" in delta:
                    self._end_line()
                self._put(text)

    def _think(self, text: str, ended: bool) -> None:
        if (text or (self._thinks and ended)) and sys.stderr.isatty():
            write(text or "\n\n", err=True)
        self._thinks = bool(text) or (self._thinks and not ended)

    def write_body(self, job_id: str, body: Completion) -> None:
        """Print a result instead of events.

        Raises:
            InvalidRequest: if it has vectors in place of texts.
        """
        if not body.choices:
            told = f"{job_id}: made vectors and no text"
            raise InvalidRequest(None, told, f"give --json to omlx-submit result {job_id}")
        for choice in body["choices"]:
            text = _answer(choice)
            if choice["index"] == 0:
                self._put(text)
            else:
                self._others[choice["index"]] = [text]

    def end(self) -> None:
        """Print the other choices, and end the last line."""
        for index, pieces in sorted(self._others.items()):
            self._end_line()
            self._put(f"--- choice {index} ---\n")
            self._put("".join(pieces))
        self._end_line()

    def _put(self, text: str) -> None:
        if text:
            write(text)
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            write("\n")
            self._at_line_start = True


def _answer(choice: dict[str, Any]) -> str:
    """The text of a choice; of a decision, all texts with their probabilities."""
    if not (shares := choice.get("probabilities")):
        return answer_text(choice)
    likeliest_first = sorted(shares, key=shares.__getitem__, reverse=True)
    return "\n".join(f"{shares[text]:.6f} {text}" for text in likeliest_first)


def show_stream(producer: Producer, job_id: str, *, as_json: bool) -> None:
    """Print a job's events or text until its end, and its result if no text came with them.

    Raises:
        JobFailed, JobCancelled: if it ended so.
    """
    writer, event, has_text = TextWriter(job_id), None, False
    with WaitReasons(producer.connection, job_id) as reasons:
        for event in producer.stream(job_id):
            reasons.heard()
            if isinstance(event, TokensEvent):
                has_text = has_text or any(choice.text for choice in event.choices)
            if as_json:
                write(event.model_dump_json() + "\n")
            else:
                writer.write(event)
    writer.end()
    if isinstance(event, EndEvent) and not event.end.ok:
        raise event.end.error(job_id)
    if not has_text:
        # Decisions and short bulk jobs publish no tokens, and streams expire.
        show_result(producer, job_id, None, as_json=as_json)


def show_result(producer: Producer, job_id: str, timeout: float | None, *, as_json: bool) -> None:
    with WaitReasons(producer.connection, job_id):
        body = producer.result(job_id, timeout)
    if as_json:
        write(json.dumps(body, ensure_ascii=False) + "\n")
        return
    writer = TextWriter()
    writer.write_body(job_id, body)
    writer.end()
