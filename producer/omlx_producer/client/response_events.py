"""A job's events as those of OpenAI's streamed responses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from omlx_producer.client.chunks import ChatChunks
from omlx_producer.wire import EndEvent, GenerationRequest, JobEvent
from omlx_producer.wire.answer import (
    begun_response,
    call_item,
    ended_response,
    status_of,
    text_item,
)
from omlx_producer.wire.events import FinishReason

# The first part of the names of a text's events, by the type of its item.
_TEXTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class ResponseEvents:
    """Turns the events of one job, from its first on, into those of a streamed response.

    Each thought and each text is an item of the output and comes as it is written. Calls of
    functions come whole, with the end of the job.

    Args:
        model: the alias that the response names.
        request: that `chat_fields` has made.

    Attributes:
        told: the number of the next event. A failure becomes an event only after another one.
    """

    def __init__(self, job_id: str, model: str, request: GenerationRequest) -> None:
        self._job_id = job_id
        self._chunks = ChatChunks(job_id, model)
        self._request = request
        self._items = list[dict[str, Any]]()
        self.told = 0
        self._writes = False

    def take(self, event: JobEvent) -> Iterator[dict[str, Any]]:
        """The events of the response that one event of its job adds."""
        if isinstance(event, EndEvent) and not event.end.ok:
            if self.told:
                error = {"code": "server_error", "message": event.error}
                failed = {"status": "failed", "error": error, "output": self._items}
                yield self._event("response.failed", response={**self._begun, **failed})
            return
        chunks = list(self._chunks.take(event))
        if not self.told:
            yield self._event("response.created", response=self._begun)
            yield self._event("response.in_progress", response=self._begun)
        for chunk in chunks:
            for choice in chunk["choices"]:
                yield from self._write("reasoning", choice["delta"].get("reasoning_content"))
                yield from self._write("message", choice["delta"].get("content"))
        if isinstance(event, EndEvent):
            reason = event.finish_reasons[0]
            calls = event.tool_calls[0] if event.tool_calls else []
            if not (self._items or calls):
                yield from self._begin_text("message")
            yield from self._end_text(reason)
            for index, call in enumerate(calls):
                yield from self._call(call_item(self._job_id, index, call.model_dump()))
            response = ended_response(self._begun, reason, self._items, event.usage)
            yield self._event(f"response.{response['status']}", response=response)

    @cached_property
    def _begun(self) -> dict[str, Any]:
        """The response before its output, once the first event has told its head."""
        return begun_response(self._request, self._chunks.head)

    def _write(self, kind: str, text: str | None) -> Iterator[dict[str, Any]]:
        """Add to the text that is written, or begin another one."""
        if not text:
            return
        if not (self._writes and self._items[-1]["type"] == kind):
            yield from self._end_text("stop")
            yield from self._begin_text(kind)
        self._items[-1]["content"][0]["text"] += text
        yield self._of_part(f"{_TEXTS[kind]}.delta", delta=text)

    def _begin_text(self, kind: str) -> Iterator[dict[str, Any]]:
        self._writes = True
        item = text_item(self._job_id, kind, "", None)
        if again := sum(each["type"] == kind for each in self._items):
            item["id"] += f"_{again}"
        self._items.append(item)
        yield self._of_item("response.output_item.added", item={**item, "content": []})
        yield self._of_part("response.content_part.added", part={**item["content"][0]})

    def _end_text(self, reason: FinishReason) -> Iterator[dict[str, Any]]:
        if not self._writes:
            return
        self._writes = False
        item = self._items[-1]
        part = item["content"][0]
        if "status" in item:
            item["status"] = status_of(reason)
        yield self._of_part(f"{_TEXTS[item['type']]}.done", text=part["text"])
        yield self._of_part("response.content_part.done", part=part)
        yield self._of_item("response.output_item.done", item=item)

    def _call(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._items.append(item)
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self._of_item("response.output_item.added", item=empty)
        name, told = "response.function_call_arguments", item["arguments"]
        yield self._of_item(f"{name}.delta", item_id=item["id"], delta=told)
        yield self._of_item(f"{name}.done", item_id=item["id"], name=item["name"], arguments=told)
        yield self._of_item("response.output_item.done", item=item)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        if kind.startswith("response.output_text"):
            fields["logprobs"] = []
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.told += 1
        return {"type": kind, "sequence_number": self.told - 1, **fields}
