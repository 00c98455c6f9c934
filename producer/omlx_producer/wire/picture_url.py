"""Pictures in requests: URLs that hold the bytes of a file, which nobody needs to fetch."""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64
from dataclasses import dataclass, field
from typing import Any

from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.terminal import counted

REMEDY = 'the file as "data:image/png;base64,..." (png, jpeg, webp, tiff or gif)'
_HEAD = re.compile(r"data:image/(png|jpe?g|webp|tiff|gif);base64,")
_SHORT = 60
"""Characters of a text that is too short for a picture."""


@dataclass(frozen=True, slots=True)
class PictureUrl:
    """A picture as a request has it: bytes here, base64 in JSON.

    Attributes:
        kind: the subtype of its media type, such as ``png``. Nobody compares it with the bytes.
        data: the bytes of its file.
    """

    kind: str
    data: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"data:image/{self.kind};base64,{b2a_base64(self.data, newline=False).decode()}"

    @classmethod
    def read(cls, given: Any) -> PictureUrl:
        """A picture of a request.

        Raises:
            InvalidRequest: without a field, and without anything of the picture.
        """
        if isinstance(given, cls):
            return given
        found = _HEAD.match(given) if isinstance(given, str) else None
        if found is None:
            raise InvalidRequest(None, f"got {_named(given)}", f"give {REMEDY}")
        try:
            data = a2b_base64(given[found.end() :], strict_mode=True)
        except ValueError:
            raise InvalidRequest(
                None, "what follows the comma is not base64", "encode the file without line breaks"
            ) from None
        if not data:
            raise InvalidRequest(None, "nothing follows the comma", f"give {REMEDY}")
        return cls(found[1], data)


def _named(given: Any) -> str:
    """What a sentence calls something that is no picture, but may hold one."""
    if isinstance(given, str) and len(given) > _SHORT and ":" not in given[:_SHORT]:
        return f"{counted(len(given), 'character')} that are no URL"
    return f"{shown(given)}, and workers fetch nothing"
