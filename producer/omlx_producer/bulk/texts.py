"""A text file for each row of a run, named after the row's id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from omlx_producer.bulk.pictures import PDF_SUFFIX, SUFFIXES
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import answer_text
from omlx_producer.wire.answer import as_completion

SUFFIX = ".txt"
_PICTURE = re.compile(
    rf"(.*[^/])(?:{'|'.join(map(re.escape, (*SUFFIXES, PDF_SUFFIX)))})(#[0-9]+)?",
    re.IGNORECASE | re.DOTALL,
)
# Parts of an id that are no names of files.
_NO_NAMES = {"": "%", ".": "%2E", "..": "%2E%2E"}


def require_no_texts(folder: Path) -> None:
    """Refuse a folder that has text files, which could be replaced.

    Raises:
        InvalidRequest: with the remedy.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest("each", f"got {str(folder)!r}, which is no folder", "give another")
    if found := next(folder.rglob(f"*{SUFFIX}"), None):
        raise InvalidRequest(
            "each", f"{found} is of no run of omlx-submit", "give another folder, or move it away"
        )


def write_texts(documents: Callable[[], Iterable[Mapping[str, Any]]], folder: Path) -> int:
    """Write the text of each result, that of its first choice, and return how many there are.

    The row ``a/b.png`` is in ``a/b.txt``, and ``scan.pdf#3`` in ``scan#3.txt``. Rows that would
    share a file keep the suffix of the picture, as ``a/b.png.txt``.

    Args:
        documents: gives all output lines anew.

    Raises:
        OSError: if a file cannot be written.
    """
    names, count = Counter[str](), 0
    for document in documents():
        names.update({document["custom_id"], _short(document["custom_id"])})
    for document in documents():
        name = _short(document["custom_id"])
        path = folder / _as_path(name if names[name] == 1 else document["custom_id"])
        path.parent.mkdir(parents=True, exist_ok=True)
        choices = as_completion(document["response"]["body"])["choices"]
        path.write_text(answer_text(choices[0]) or "", "utf-8", "backslashreplace")
        count += 1
    return count


def _short(custom_id: str) -> str:
    """An id without the suffix of its picture."""
    found = _PICTURE.fullmatch(custom_id)
    return found[1] + (found[2] or "") if found else custom_id


def _as_path(name: str) -> str:
    """The file of a name, in the folder whatever the name is."""
    parts = (_NO_NAMES.get(part, part) for part in name.replace("\0", "%00").split("/"))
    return "/".join(parts) + SUFFIX
