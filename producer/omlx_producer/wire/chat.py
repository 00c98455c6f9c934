"""The messages of a chat, in OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PlainSerializer, PlainValidator, Tag, model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.events import ToolCall
from omlx_producer.wire.openai_fields import fold_image, fold_message, fold_part
from omlx_producer.wire.picture_url import REMEDY, PictureUrl
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.request_part import RequestPart, Since, Text

MAX_PICTURES = 16
MAX_PICTURE_BYTES = 32 * 2**20
"""Of all pictures of a request. As base64 they leave a third of the longest payload to texts."""

_IMAGE_URL = 'an object such as {"url": "data:image/png;base64,..."}'


class TextPart(RequestPart):
    """One text part of a message's content. A refusal of the assistant is its text."""

    type: Annotated[Literal["text"], Remedy('"text" or "image_url"')]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        return fold_part(data) if isinstance(data, dict) else data


class ImageUrl(RequestPart):
    """Where a picture is: in its URL."""

    url: Annotated[
        PictureUrl,
        PlainValidator(PictureUrl.read, json_schema_input_type=str),
        PlainSerializer(str, return_type=str),
        Remedy(REMEDY),
    ]

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        if isinstance(data, str):
            # It may be a picture, of which no sentence quotes anything.
            raise InvalidRequest(None, "got text", f"give {_IMAGE_URL}")
        return fold_image(data) if isinstance(data, dict) else data


class ImagePart(RequestPart):
    """One picture of a user's message."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, Since(2), Remedy(_IMAGE_URL)]

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        return fold_part(data) if isinstance(data, dict) else data


def _kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "[image]" if kind == "image_url" else "[text]"


Part = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[ImagePart, Tag("[image]")],
    Discriminator(_kind_of),
]


class Message(RequestPart):
    """One chat message.

    A user's ``content`` may have pictures among its texts. An assistant's may be null; its
    ``refusal``, if there is one, is then its text. The message of an answer can be sent back as it
    is, with its ``tool_calls``.

    >>> Message(role="user", content="Write a function that reverses a list.").role
    'user'
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[Part], Field(fail_fast=True)],
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

    @model_validator(mode="after")
    def _check_pictures(self) -> Self:
        if self.pictures and self.role != "user":
            raise InvalidRequest(
                next(iter(self.pictures)),
                f"given in a message of the {self.role}",
                "give pictures in those of the user",
            )
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def pictures(self) -> dict[str, bytes]:
        """The files of its pictures, by their fields, in their order."""
        parts = () if isinstance(self.content, str) else self.content
        return {
            f"content[{index}].image_url": part.image_url.url.data
            for index, part in enumerate(parts)
            if isinstance(part, ImagePart)
        }

    @property
    def characters(self) -> int:
        """Characters of all that the model reads of it."""
        arguments = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.reasoning_content or "") + arguments
