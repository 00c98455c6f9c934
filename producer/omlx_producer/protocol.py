"""What travels between producers, Redis and workers: requests, events, results, names.

One RQ job carries one generation request. Its function is named ``JOB_FUNCTION``, its only
keyword argument is ``request``, the JSON form of a `GenerationRequest`, and it is written with
RQ's JSON serializer. Workers refuse anything else; nothing is ever unpickled.

A worker writes every event of a job twice in one script call: as an entry of the stream
``events_key(job_id)`` (field ``event``) and as a message on the channel
``tokens_channel(job_id)``; both hold the same JSON document, one of:

``tokens``     new tokens of one step: ``n`` is the number of tokens of the job so far, all
               choices together; ``choices`` the choices that moved (`ChoiceDelta`)
``done``       the job finished: ``finish_reasons`` by choice, and ``usage``
``failed``     the job failed: ``error`` is one sentence
``cancelled``  the job was cancelled or stopped: ``error`` says by what

The last three are terminal: exactly one of them ends a stream. Stream ids are token counts:
a ``tokens`` event has the id ``<n>-0``, the terminal event ``<n>-1``, so ids only grow, Redis
itself refuses a late writer, and a consumer's cursor is a count of tokens. From one event to the
next ``n`` grows by the tokens in it, and by one when it has text but no tokens (text held back
until a stop token, which is in no choice), so that a consumer sees a gap. The ``n`` of a terminal
event may be larger than any before it: not every job publishes its tokens. Concatenating the
``text`` of one choice over all events gives exactly the text in the result.

A terminal event appears with, or before, the change of the job's status and the result. Where
none was written, by a tool that knows nothing of events, status and result stand for it.

The result (``job.return_value()``) is an OpenAI response body: a ``chat.completion`` for
``messages``, a ``text_completion`` for ``prompt``.

Jobs of a bulk run have ids of their own making, ``bulk_job_id``. Whoever ends one also adds its id
(field ``job``) to the stream ``ended_stream(job_id)`` of its run, in the same transaction, so that
a client with a million rows follows one key. An entry says that the job is worth looking at, no
more: it may come twice, or late.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from omlx_producer.errors import InvalidRequest
from omlx_producer.events import (
    CancelledEvent,
    ChoiceDelta,
    DoneEvent,
    FailedEvent,
    FinishReason,
    ModelInfo,
    Speculation,
    TerminalEvent,
    TokenEvent,
    TokenLogprob,
    TokensEvent,
    Usage,
    parse_event,
)
from omlx_producer.request import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_DRAFT_DEPTH,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    Message,
    ModelAlias,
    ResponseFormat,
    StopString,
    TextPart,
    TokenId,
)

JOB_FUNCTION = "omlx_worker.jobs.generate"
MODELS_KEY = "omlx:models"
# How long the stream of a bulk run is kept after its last entry.
ENDED_SECONDS = 7 * 24 * 3600

Priority = Literal["high", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def queue_name(model: str, priority: Priority) -> str:
    """The RQ queue that holds the jobs of a model alias at one priority."""
    return f"omlx:{model}:{priority}"


def events_key(job_id: str) -> str:
    """The Redis stream that keeps the events of a job until its result expires."""
    return f"omlx:events:{job_id}"


def tokens_channel(job_id: str) -> str:
    """The pub/sub channel on which the events of a job appear as they happen."""
    return f"omlx:tokens:{job_id}"


def wake_channel(model: str) -> str:
    """The channel on which producers ring for the workers of a model alias; any payload."""
    return f"omlx:wake:{model}"


def bulk_job_id(run: str, row: str) -> str:
    """The id of a job of a bulk run; both parts are hexadecimal."""
    return f"bulk-{run}-{row}"


def ended_stream(job_id: str) -> str | None:
    """The stream that hears of the end of a bulk run's job; None for other jobs."""
    found = re.match(r"bulk-([0-9a-f]+)-", job_id)
    return f"omlx:bulk:{found[1]}" if found else None


__all__ = [
    "DEFAULT_MAX_TOKENS",
    "ENDED_SECONDS",
    "JOB_FUNCTION",
    "MAX_CHOICES",
    "MAX_DRAFT_DEPTH",
    "MAX_LOGIT_BIASES",
    "MAX_PROMPT_CHARACTERS",
    "MAX_STOP_STRINGS",
    "MAX_TOP_LOGPROBS",
    "MODELS_KEY",
    "PRIORITIES",
    "CancelledEvent",
    "ChoiceDelta",
    "DoneEvent",
    "FailedEvent",
    "FinishReason",
    "GenerationRequest",
    "InvalidRequest",
    "Message",
    "ModelAlias",
    "ModelInfo",
    "Priority",
    "ResponseFormat",
    "Speculation",
    "StopString",
    "TerminalEvent",
    "TextPart",
    "TokenEvent",
    "TokenId",
    "TokenLogprob",
    "TokensEvent",
    "Usage",
    "bulk_job_id",
    "ended_stream",
    "events_key",
    "parse_event",
    "queue_name",
    "tokens_channel",
    "wake_channel",
]
