"""The wire between producers, Redis and workers: keys, requests, events, results.

docs/wire.md describes it for other languages, with commands to try.

One RQ job carries one generation request. Its function is named ``JOB_FUNCTION``. Its only argument
is the keyword ``request``, the JSON form of a `GenerationRequest`. RQ's JSON serializer writes it.
Workers refuse anything else; nothing is ever unpickled.

A worker writes every event of a job twice, in one script call: as an entry of the stream
``events_key(job_id)`` (field ``event``) and as a message on the channel
``tokens_channel(job_id)``. Both hold the same JSON document:

``tokens``     the new tokens since the event before. ``n`` is the number of tokens of the job
               so far, all choices together; ``choices`` are those that changed (`ChoiceDelta`)
``done``       the job finished: ``finish_reasons`` by choice, the calls of tools, and ``usage``
``failed``     the job failed: ``error`` is one sentence, ``code`` says more
``cancelled``  the job was cancelled or stopped: ``error`` says why

The last three are an `EndEvent`: exactly one ends a stream. Stream ids are token counts. A
``tokens`` event has the id ``<n>-0``, the terminal event ``<n>-1``. So ids only grow, Redis refuses
a late writer, and a consumer's cursor is a count of tokens.

From one event to the next, ``n`` grows by the tokens in it. An event with text but no tokens (text
held back until a stop token, which is in no choice) adds one, so a consumer detects a gap. The
``n`` of a terminal event may be larger than any before it: not every job publishes its tokens; one
that finishes has published all or none. A Redis server that was killed may lose the last entries:
the worker writes them again, or another worker writes the same tokens in other events. Each choice
of an event says how many of its tokens (``start``) and characters (``offset``) come before, and has
a ``digest`` of its tokens so far, so a consumer cuts off what it has had and notices other tokens.
In a ``done`` event they are the totals of each choice. The ``text`` of a choice, concatenated
over all events, is exactly the text in the result, but for the prompt that ``echo`` puts before it
there. If the first event has a ``markup``,
`omlx_producer.wire.markup.read` splits that text into the parts of the result's message, with the
``marks`` of all events of the choice.

A terminal event appears together with the job's new status and its result. Other tools end jobs
without an event; then status and result stand for it.

The result (``job.return_value()``) is an OpenAI response body: a ``chat.completion`` for
``messages``, a ``text_completion`` for ``prompt``, a ``list`` of embeddings for ``input``.

Rows of batches are described in `omlx_producer.bulk.batch`.
"""

from __future__ import annotations

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.chat import MAX_PICTURES, ImagePart, Message, TextPart
from omlx_producer.wire.completion import Completion, answer_text
from omlx_producer.wire.embedding import EncodingFormat, embedding_requests
from omlx_producer.wire.end import End
from omlx_producer.wire.endpoints import (
    CHAT_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    RESPONSES_URL,
)
from omlx_producer.wire.events import (
    Alternative,
    ChoiceDelta,
    CompletionTokensDetails,
    EndEvent,
    FinishReason,
    FunctionCall,
    JobEvent,
    ModelInfo,
    PromptLogprob,
    PromptTokensDetails,
    Speculation,
    TokenLogprob,
    TokensEvent,
    ToolCall,
    Usage,
    parse_event,
    token_digest,
)
from omlx_producer.wire.keys import (
    EXPIRING_KEY,
    JOB_FUNCTION,
    MODELS_KEY,
    PRIORITIES,
    WIRE_FIELD,
    WIRE_VERSION,
    Priority,
    events_key,
    queue_name,
    read_queue_name,
    row_job_id,
    tokens_channel,
    wake_channel,
    workers_key,
)
from omlx_producer.wire.kind import require_kind
from omlx_producer.wire.markup import Markup
from omlx_producer.wire.picture_url import PictureUrl
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.repetition import LOOPS, PICTURE_LOOPS, RepetitionDetection
from omlx_producer.wire.request import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_MAX_TOKENS,
    FILTERS,
    MAX_TOP_LOGPROBS,
    CompletionWindow,
    GenerationRequest,
    Metadata,
    ReasoningEffort,
    seconds_of,
    text_fields,
)
from omlx_producer.wire.request_part import MAX_PROMPT_CHARACTERS, RequestPart
from omlx_producer.wire.responses import chat_fields
from omlx_producer.wire.structure import Constraint, NamedSchema, ResponseFormat, StructuredOutputs
from omlx_producer.wire.tools import Calling, FunctionDefinition, Tool, ToolChoice, ToolChoiceOption

__all__ = [
    "CHAT_URL",
    "COMPLETION_URL",
    "DEFAULT_CHAT_TOKENS",
    "DEFAULT_MAX_TOKENS",
    "EMBEDDINGS_URL",
    "EXPIRING_KEY",
    "FILTERS",
    "JOB_FUNCTION",
    "LOOPS",
    "MAX_PICTURES",
    "MAX_PROMPT_CHARACTERS",
    "MAX_TOP_LOGPROBS",
    "MODELS_KEY",
    "PICTURE_LOOPS",
    "PRIORITIES",
    "RESPONSES_URL",
    "WIRE_FIELD",
    "WIRE_VERSION",
    "Alternative",
    "Calling",
    "ChoiceDelta",
    "Completion",
    "CompletionTokensDetails",
    "CompletionWindow",
    "Constraint",
    "EncodingFormat",
    "End",
    "EndEvent",
    "FinishReason",
    "FunctionCall",
    "FunctionDefinition",
    "GenerationRequest",
    "ImagePart",
    "InvalidRequest",
    "JobEvent",
    "Markup",
    "Message",
    "Metadata",
    "ModelInfo",
    "NamedSchema",
    "PictureUrl",
    "Priority",
    "PromptLogprob",
    "PromptTokensDetails",
    "ReasoningEffort",
    "Remedy",
    "RepetitionDetection",
    "RequestPart",
    "ResponseFormat",
    "Speculation",
    "StructuredOutputs",
    "TextPart",
    "TokenLogprob",
    "TokensEvent",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolChoiceOption",
    "Usage",
    "answer_text",
    "chat_fields",
    "embedding_requests",
    "events_key",
    "parse_event",
    "queue_name",
    "read_queue_name",
    "require_kind",
    "row_job_id",
    "seconds_of",
    "text_fields",
    "token_digest",
    "tokens_channel",
    "wake_channel",
    "workers_key",
]
