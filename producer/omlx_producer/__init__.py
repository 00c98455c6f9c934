"""Submit generation jobs to omlx-queue workers and read their tokens; never imports MLX.

A name is imported when it is first used, so `import omlx_producer` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omlx_producer.async_producer import AsyncJobHandle, AsyncProducer
    from omlx_producer.bulk.arguments import BulkArguments
    from omlx_producer.bulk.batch import BatchState
    from omlx_producer.bulk.detached import BatchHandle
    from omlx_producer.bulk.library import BulkResults
    from omlx_producer.bulk.result import BulkResult, read_results
    from omlx_producer.client.chunks import ChatChunks, TextChunks
    from omlx_producer.client.fields import RequestFields
    from omlx_producer.client.outcome import JobState
    from omlx_producer.client.reader import AsyncTokenStream
    from omlx_producer.client.stream import TokenStream
    from omlx_producer.errors import (
        InvalidRequest,
        JobCancelled,
        JobError,
        JobFailed,
        JobTimeout,
        MalformedResult,
        ModelNotFound,
        OmlxQueueError,
        TokensLost,
        UnknownJob,
        UnsuitableRedis,
    )
    from omlx_producer.producer import JobHandle, Producer
    from omlx_producer.wire import (
        ChoiceDelta,
        End,
        EndEvent,
        GenerationRequest,
        JobEvent,
        Message,
        ModelInfo,
        Priority,
        TokenLogprob,
        TokensEvent,
        ToolCall,
        Usage,
    )
    from omlx_producer.wire.completion import AssistantMessage, Choice, Completion

__all__ = [
    "AssistantMessage",
    "AsyncJobHandle",
    "AsyncProducer",
    "AsyncTokenStream",
    "BatchHandle",
    "BatchState",
    "BulkArguments",
    "BulkResult",
    "BulkResults",
    "ChatChunks",
    "Choice",
    "ChoiceDelta",
    "Completion",
    "End",
    "EndEvent",
    "GenerationRequest",
    "InvalidRequest",
    "JobCancelled",
    "JobError",
    "JobEvent",
    "JobFailed",
    "JobHandle",
    "JobState",
    "JobTimeout",
    "MalformedResult",
    "Message",
    "ModelInfo",
    "ModelNotFound",
    "OmlxQueueError",
    "Priority",
    "Producer",
    "RequestFields",
    "TextChunks",
    "TokenLogprob",
    "TokenStream",
    "TokensEvent",
    "TokensLost",
    "ToolCall",
    "UnknownJob",
    "UnsuitableRedis",
    "Usage",
    "read_results",
]

# The modules that define these names. Those that import the least come first.
_HOMES = (
    "errors",
    "wire",
    "client.fields",
    "wire.completion",
    "client.chunks",
    "client.outcome",
    "client.stream",
    "client.reader",
    "producer",
    "async_producer",
    "bulk.batch",
    "bulk.result",
    "bulk.detached",
    "bulk.library",
)

if not TYPE_CHECKING:  # To type checkers, a module with `__getattr__` has every name.

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for home in _HOMES:
                module = import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
