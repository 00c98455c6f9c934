"""Submit generation jobs to omlx-queue workers and read their tokens; never imports MLX."""

from omlx_producer.client import JobHandle, Producer
from omlx_producer.errors import (
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    JobTimeout,
    OmlxQueueError,
    TokensLost,
    UnknownJob,
)
from omlx_producer.outcome import JobState
from omlx_producer.protocol import (
    CancelledEvent,
    ChoiceDelta,
    DoneEvent,
    FailedEvent,
    GenerationRequest,
    Message,
    ModelInfo,
    Priority,
    TerminalEvent,
    TokenEvent,
    TokenLogprob,
    TokensEvent,
    Usage,
)
from omlx_producer.stream import AsyncTokenStream, TokenStream

__all__ = [
    "AsyncTokenStream",
    "CancelledEvent",
    "ChoiceDelta",
    "DoneEvent",
    "FailedEvent",
    "GenerationRequest",
    "InvalidRequest",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobHandle",
    "JobState",
    "JobTimeout",
    "Message",
    "ModelInfo",
    "OmlxQueueError",
    "Priority",
    "Producer",
    "TerminalEvent",
    "TokenEvent",
    "TokenLogprob",
    "TokenStream",
    "TokensEvent",
    "TokensLost",
    "UnknownJob",
    "Usage",
]
