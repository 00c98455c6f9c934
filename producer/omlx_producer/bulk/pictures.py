"""Pictures of an input: the files of a folder, what a column names or holds, and pages of PDFs.

A file is read when its row is made, and no earlier.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import counted
from omlx_producer.wire.chat import MAX_PICTURE_BYTES
from omlx_producer.wire.picture_url import PictureUrl

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".gif")
PDF_SUFFIX = ".pdf"
PATH = "path"
"""The column of a folder: the path of each picture in it, or ``scan.pdf#3`` for a page."""
PAGE_DPI = 200
MAX_PAGE_PIXELS = 16_000_000
JPEG_QUALITY = 95

# The first bytes of each kind.
_KINDS = {
    "png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "jpeg": re.compile(rb"\xff\xd8\xff"),
    "webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "tiff": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "gif": re.compile(rb"GIF8[79]a"),
}
_PAGE = re.compile(rf"(.+\{PDF_SUFFIX})#([1-9][0-9]{{0,6}})", re.IGNORECASE | re.DOTALL)
_URL = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)
# PDFium has no locks of its own.
_pdfium_lock = threading.Lock()


def pictures_in(source: Path) -> Iterator[str]:
    """The pictures of a folder in the order of their paths, subfolders too, a page of a PDF each.

    A PDF that cannot be read comes as it is. Hidden files and folders are left out.

    Args:
        source: the folder, or a single file.

    Yields:
        Paths in the folder, with ``#`` and the number of the page, from 1, of a PDF.

    Raises:
        InvalidRequest: if there is a PDF, and pypdfium2 is not installed.
        OSError: if a folder cannot be read.
    """
    names = sorted(name for name in _files(source) if _is_picture(name))
    if pdf := next(filter(_is_pdf, names), ""):
        try:
            _import_pdfium()
        except InvalidRequest as error:
            error.got = f"{pdf} {error.got}"
            raise
    folder = folder_of(source)
    for name in names:
        pages = _count_pages(folder / name) if _is_pdf(name) else 0
        yield from (f"{name}#{page}" for page in range(1, pages + 1)) if pages else (name,)


def other_files(source: Path) -> Counter[str]:
    """How many other files a folder has, by suffix.

    Raises:
        OSError: if a folder cannot be read.
    """
    names = (name for name in _files(source) if not _is_picture(name))
    return Counter(Path(name).suffix.lower() or Path(name).name for name in names)


def folder_of(source: Path) -> Path:
    """The folder to which paths in an input are relative: itself, or that of its file."""
    return source if source.is_dir() else source.parent


def _files(source: Path) -> Iterator[str]:
    if not source.is_dir():
        yield source.name
        return

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(source, onerror=fail):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Links could lead round in a circle.
        files += [name for name in folders if (here / name).is_symlink()]
        for name in files:
            if not name.startswith("."):
                yield (here / name).relative_to(source).as_posix()


def _is_picture(name: str) -> bool:
    return name.lower().endswith((*SUFFIXES, PDF_SUFFIX))


def _is_pdf(name: str) -> bool:
    return name.lower().endswith(PDF_SUFFIX)


def path_of(value: Any) -> Any:
    """A value of a column; of a picture's bytes, alone or beside its path, only the path."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return value["path"]
    return None if isinstance(value, bytes) and _kind(value) else value


def read_picture(value: Any, folder: Path) -> tuple[PictureUrl, str]:
    """A picture, and what a sentence calls it: its path, or how many bytes it has.

    Args:
        value: its path, in this folder if it is relative; its bytes; or ``{"bytes", "path"}``, as
            data sets of Hugging Face have it.

    Raises:
        InvalidRequest: without a field, if it is missing, empty or no picture by its first bytes.
    """
    name, data = (value, None) if isinstance(value, str) else (None, value)
    if isinstance(value, Mapping):
        name, data = value.get("path"), value.get("bytes")
    told = repr(name) if name else f"{len(data)} bytes" if isinstance(data, bytes) else repr(value)
    try:
        if data is None and isinstance(name, str):
            data = _read_file(name, folder)
        return _picture_of(data), told
    except InvalidRequest as error:
        error.got = f"got {told:.200}, which {error.got}"
        raise


def with_picture(text: str, picture: PictureUrl) -> list[dict[str, Any]]:
    """The parts of a message. The text comes first, so rows share what is read of it."""
    image = {"type": "image_url", "image_url": {"url": picture}}
    return [{"type": "text", "text": text}, image]


def _picture_of(data: Any) -> PictureUrl:
    if not isinstance(data, bytes):
        raise InvalidRequest(None, "is no path", "give the path of a picture")
    if not data:
        raise InvalidRequest(None, "is empty", "give a whole picture")
    if len(data) > MAX_PICTURE_BYTES:
        raise InvalidRequest(None, f"is over {MAX_PICTURE_BYTES >> 20} MiB", "make it smaller")
    if kind := _kind(data):
        return PictureUrl(kind, data)
    *others, last = _KINDS
    kinds = f"{', '.join(others)} or {last}"
    raise InvalidRequest(None, f"is no {kinds} by its first bytes", "convert it")


def _kind(data: bytes) -> str | None:
    return next((kind for kind, first in _KINDS.items() if first.match(data)), None)


def _read_file(name: str, folder: Path) -> bytes:
    """The first bytes of a file up to one over the limit, or a page of a PDF as JPEG.

    Raises:
        InvalidRequest: if it cannot be read; what the file is or has comes after its name.
    """
    path, page = folder / name, None
    if (found := _PAGE.fullmatch(name)) and not os.path.isfile(path):
        path, page = folder / found[1], int(found[2])
    if not os.path.isfile(path):
        if _URL.match(name):
            raise InvalidRequest(None, "is no path", "save it in a file: none is fetched")
        raise InvalidRequest(None, "is no file", "correct the path")
    try:
        if _is_pdf(path.name):
            return _render(path, page)
        with path.open("rb") as stream:
            return stream.read(MAX_PICTURE_BYTES + 1)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise InvalidRequest(None, problem, "make it readable") from None


def _count_pages(path: Path) -> int:
    """The pages of a PDF; 0 of one that cannot be read."""
    with contextlib.suppress(InvalidRequest, OSError), _open_pdf(path) as document:
        return len(document)
    return 0


def _render(path: Path, number: int | None) -> bytes:
    """A page of a PDF as JPEG, its forms filled in.

    Args:
        number: from 1; None for the only one.

    Raises:
        InvalidRequest: if the PDF cannot be read, or there is no such page.
        OSError: if the file cannot be read.
    """
    written = io.BytesIO()
    with _open_pdf(path) as document:
        pages = len(document)
        if (number is None and pages != 1) or (number or 1) > pages:
            example = f"give one of them, as in {path.name}#{pages}"
            raise InvalidRequest(None, f"has {counted(pages, 'page')}", example)
        document.init_forms()
        page = document[(number or 1) - 1]
        scale = min(PAGE_DPI / 72, math.sqrt(MAX_PAGE_PIXELS / math.prod(page.get_size())))
        picture = page.render(scale=scale).to_pil()
        picture.save(written, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return written.getvalue()


@contextlib.contextmanager
def _open_pdf(path: Path) -> Iterator[Any]:
    pdfium = _import_pdfium()
    with _pdfium_lock:
        try:
            with contextlib.closing(pdfium.PdfDocument(path)) as document:
                yield document
        except pdfium.PdfiumError:
            problem = "is no whole PDF, or needs a password"
            raise InvalidRequest(None, problem, "save it anew") from None


def _import_pdfium() -> Any:
    """The module ``pypdfium2``.

    Raises:
        InvalidRequest: if it is not installed, or Pillow is not.
    """
    try:
        import PIL.Image  # noqa: F401
        import pypdfium2 as pdfium
    except ImportError as error:
        raise InvalidRequest(
            None, f"needs {error.name}, which is not installed", "pip install 'omlx-queue[pdf]'"
        ) from None
    return pdfium
