"""The wire between producers, Redis and workers: keys, requests, events, results.

docs/wire.md describes it for other languages, with commands to try.

One RQ job carries one generation request. Its function is named ``JOB_FUNCTION``. Its only argument
is the keyword ``request``, the JSON form of a `GenerationRequest`. RQ's JSON serializer writes it.
Workers refuse anything else; nothing is ever unpickled.

A worker writes every event of a job twice, in one script call: as an entry of the stream
``events_key(job_id)`` (field ``event``) and as a message on the channel
``tokens_channel(job_id)``. Both hold the same JSON document:

``tokens``     the new tokens of one step. ``n`` is the number of tokens of the job so far, all
               choices together; ``choices`` are the choices that changed (`ChoiceDelta`)
``done``       the job finished: ``finish_reasons`` by choice, the calls of tools, and ``usage``
``failed``     the job failed: ``error`` is one sentence
``cancelled``  the job was cancelled or stopped: ``error`` says why

The last three are terminal: exactly one of them ends a stream. Stream ids are token counts. A
``tokens`` event has the id ``<n>-0``, the terminal event ``<n>-1``. So ids only grow, Redis refuses
a late writer, and a consumer's cursor is a count of tokens.

From one event to the next, ``n`` grows by the tokens in it. An event with text but no tokens (text
held back until a stop token, which is in no choice) adds one, so a consumer detects a gap. The
``n`` of a terminal event may be larger than any before it: not every job publishes its tokens; one
that finishes has published all or none. A Redis server that was killed may lose the last entries:
the worker writes them again, or another worker writes the same tokens in other events. Each choice
of an event says how many of its tokens (``start``) and characters (``offset``) come before, and has
a ``digest`` of its tokens so far, so a consumer cuts off what it has had and notices other tokens.
The ``choices`` of a ``done`` event say so of a choice's end. The
``text`` of a choice, concatenated over all events, is exactly the text in the result. If the first
event has a ``markup``, `omlx_producer.markup.read` splits that text into the parts of the result's
message, with the ``marks`` of all events of the choice.

A terminal event appears with, or before, the change of the job's status and the result. Other tools
end jobs without an event; then status and result stand for it.

The result (``job.return_value()``) is an OpenAI response body: a ``chat.completion`` for
``messages``, a ``text_completion`` for ``prompt``.

Rows of batches are described in `omlx_producer.bulk.batch`.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

from omlx_producer.constraint import Constraint
from omlx_producer.errors import InvalidRequest
from omlx_producer.events import (
    CancelledEvent,
    ChoiceDelta,
    DoneEvent,
    FailedEvent,
    FinishReason,
    FunctionCall,
    ModelInfo,
    PromptTokensDetails,
    Speculation,
    TerminalEvent,
    TokenEvent,
    TokenLogprob,
    TokensEvent,
    ToolCall,
    Usage,
    parse_event,
    token_digest,
)
from omlx_producer.markup import Markup
from omlx_producer.messages import Message, TextPart
from omlx_producer.request import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_CHARACTERS,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    ReasoningEffort,
)
from omlx_producer.structure import NamedSchema, ResponseFormat, StructuredOutputs
from omlx_producer.tools import Calling, FunctionDefinition, Tool, ToolChoice, ToolChoiceOption

JOB_FUNCTION = "omlx_worker.jobs.generate"
MODELS_KEY = "omlx:models"
WIRE_VERSION, WIRE_FIELD = 1, "omlx_wire"
"""The version of payloads, and its field in the hash of a job or batch; absent means 1.

Raise it with every request field that older workers do not know: they leave such jobs to others.
"""

Priority = Literal["high", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def queue_name(model: str, priority: Priority) -> str:
    """The RQ queue of a model alias at a priority."""
    return f"omlx:{model}:{priority}"


def read_queue_name(queue: str) -> tuple[str, Priority] | None:
    """The model alias and the priority of a queue; None if it is not of this package."""
    found = re.fullmatch(f"omlx:([^:]+):({'|'.join(PRIORITIES)})", queue)
    return None if found is None else (found[1], cast(Priority, found[2]))


def events_key(job_id: str) -> str:
    """The stream of a job's events; it expires with the result."""
    return f"omlx:events:{job_id}"


def tokens_channel(job_id: str) -> str:
    """The pub/sub channel of a job's events."""
    return f"omlx:tokens:{job_id}"


def wake_channel(model: str) -> str:
    """The channel on which producers ring for the workers of a model alias. Any payload will do."""
    return f"omlx:wake:{model}"


def row_job_id(run: str, row: str) -> str:
    """The id of the job of a batch's row, by the row's name."""
    return f"row-{run}-{row}"


__all__ = [
    "DEFAULT_CHAT_TOKENS",
    "DEFAULT_MAX_TOKENS",
    "JOB_FUNCTION",
    "MAX_CHOICES",
    "MAX_LOGIT_BIASES",
    "MAX_PROMPT_CHARACTERS",
    "MAX_TOP_LOGPROBS",
    "MODELS_KEY",
    "PRIORITIES",
    "WIRE_FIELD",
    "WIRE_VERSION",
    "Calling",
    "CancelledEvent",
    "ChoiceDelta",
    "Constraint",
    "DoneEvent",
    "FailedEvent",
    "FinishReason",
    "FunctionCall",
    "FunctionDefinition",
    "GenerationRequest",
    "InvalidRequest",
    "Markup",
    "Message",
    "ModelInfo",
    "NamedSchema",
    "Priority",
    "PromptTokensDetails",
    "ReasoningEffort",
    "ResponseFormat",
    "Speculation",
    "StructuredOutputs",
    "TerminalEvent",
    "TextPart",
    "TokenEvent",
    "TokenLogprob",
    "TokensEvent",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolChoiceOption",
    "Usage",
    "events_key",
    "parse_event",
    "queue_name",
    "read_queue_name",
    "row_job_id",
    "token_digest",
    "tokens_channel",
    "wake_channel",
]
