"""How a row's text is read. This module imports no MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from omlx_producer.wire import FunctionCall, Markup


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a row's text becomes the message of a chat.

    Attributes:
        read_call: the calls in a text between the markers of a call, none if it cannot be read;
            None if the request has no tools. From any thread.
        read_cut: the whole calls in a text that was cut before the end marker of a call.
        parallel: whether the message may have several calls.
        tokens: the texts of the tokens that write `Markup.by_token`, by their ids.
        tail: what the template has written of the answer.
    """

    markup: Markup
    read_call: Callable[[str], list[FunctionCall]] | None = None
    read_cut: Callable[[str], list[FunctionCall]] | None = None
    parallel: bool = True
    tokens: Mapping[int, str] = field(default_factory=dict)
    tail: str = ""
