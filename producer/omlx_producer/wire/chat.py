"""The messages of a chat, in OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.events import ToolCall
from omlx_producer.wire.openai_fields import fold_message, fold_part
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.request_part import RequestPart, Text


class TextPart(RequestPart):
    """One text part of a message's content. A refusal of the assistant is its text."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        return fold_part(data) if isinstance(data, dict) else data


class Message(RequestPart):
    """One chat message.

    An assistant's ``content`` may be null; its ``refusal``, if there is one, is then its text. The
    message of an answer can be sent back as it is, with its ``tool_calls``.

    >>> Message(role="user", content="Write a function that reverses a list.").role
    'user'
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True)],
        Remedy('text or a list of parts such as {"type": "text", "text": "Hello"}'),
    ]
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(fail_fast=True)] | None,
        Remedy(
            'a list of calls such as {"id": "call_1", "type": "function", "function": '
            '{"name": "f", "arguments": "{}"}}'
        ),
    ] = None
    tool_call_id: Annotated[Text | None, Remedy("the id of the call that the message answers")] = (
        None
    )

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        return fold_message(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(
                "tool_calls", f"given in a message of the {self.role}", "only the assistant calls"
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(
                "tool_call_id",
                f"given in a message of the {self.role}",
                "give it in those of a tool",
            )
        if self.tool_call_id is None and self.role == "tool":
            raise InvalidRequest(
                "tool_call_id", "missing", "give the id of the call that the message answers"
            )
        for index, call in enumerate(self.tool_calls or ()):
            if not isinstance(call.function.parsed, dict):
                raise InvalidRequest(
                    f"tool_calls[{index}].function.arguments",
                    f"got {call.function.arguments[:60]!r}",
                    "give a JSON object as text",
                )
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @property
    def characters(self) -> int:
        """Characters of all that the model reads of it."""
        arguments = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.reasoning_content or "") + arguments
