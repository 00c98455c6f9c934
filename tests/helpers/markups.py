"""The markers of models that think between two markers, and call between two."""

from __future__ import annotations

from typing import Any

from omlx_producer.wire import Markup
from omlx_producer.wire.markup import Part
from omlx_worker.engine.rows.thinking import Thinking


def between(
    think: tuple[str, str] = ("", ""),
    call: tuple[str, str] = ("", ""),
    *,
    thinks: bool = False,
    **more: Any,
) -> Markup:
    """Markup of these markers; "" for none.

    Args:
        thinks: whether the prompt has opened the thinking.
        more: other fields.
    """
    edges: dict[Part, dict[str, Part]] = {
        "content": {think[0]: "reasoning", call[0]: "call"},
        "reasoning": {think[1]: "content"},
        "call": {call[1]: "content"},
    }
    for markers in edges.values():
        markers.pop("", None)
    return Markup(first="reasoning" if thinks else "content", edges=edges, **more)


def thinking(
    start: tuple[int, ...], end: tuple[int, ...], *, begun: bool, budget: int | None = None
) -> Thinking:
    """Thinking between markers of these tokens, which write their numbers.

    Args:
        begun: whether the prompt has opened it.
    """

    def bytes_of(token: int) -> bytes:
        return f"<{token}>".encode()

    first, last = (b"".join(map(bytes_of, tokens)).decode() for tokens in (start, end))
    return Thinking(between((first, last), thinks=begun), {}, end, end, bytes_of, budget)
