"""Pictures as requests have them."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image


@cache
def grey(width: int = 8, height: int = 8, shade: int = 0) -> bytes:
    """The file of a PNG with one shade of grey."""
    file = BytesIO()
    Image.new("L", (width, height), shade).save(file, "PNG")
    return file.getvalue()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def image(data: bytes | None = None, **more: Any) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url_of(data or grey()), **more}}


def part_of(text: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}
