"""Decodes the bytes of picture files, which anybody may have sent. This module imports no MLX."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

from omlx_producer.errors import one_line

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "GIF")
MOST_PIXELS = 64_000_000
MOST_RATIO = 200
"""The longer side by the shorter one, at most: towers make neither shorter than a patch."""
MOST_SCANS = 100
"""Of a JPEG file, as libtiff has it for those within TIFF."""

_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""What undoes an orientation of EXIF (CIPA DC-008, 4.6.4)."""
_ORIENTATION = 0x0112
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Of a JPEG file, with a length after it but at the end of a picture (ITU T.81, B.1.1.3)."""

_UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(RuntimeError, AttributeError, AssertionError, MemoryError, struct.error, zlib.error),
)
"""What Pillow raises at bytes that are not as its format says."""

# Pillow warns of more, and refuses twice as many by a header, also of a frame within a picture.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
# Of broken EXIF and the like, in files that anybody may have sent: not for the worker's log.
warnings.filterwarnings("ignore", module=r"PIL\.")


class BadPicture(ValueError):
    """A picture that cannot be looked at. The message is one sentence for the user."""


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of a picture's `pixels_of`, which are made and dropped.

    Raises:
        BadPicture: as `pixels_of` does.
    """
    return pixels_of(data).size


def pixels_of(data: bytes) -> Image.Image:
    """A picture in RGB, upright, on white where it is transparent; the first of an animation.

    Raises:
        BadPicture: if it cannot be decoded, or takes too much to decode.
    """
    if not data:
        raise BadPicture("the picture is empty; send all bytes of its file")
    try:
        picture: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
        if isinstance(picture, TiffImageFile):
            # A tile may be larger than the picture that is cut out of it.
            rows = picture.tag_v2.get(TILELENGTH, 1)
            if picture.tag_v2.get(TILEWIDTH, 1) > MOST_PIXELS // rows:
                raise Image.DecompressionBombError
    except UnidentifiedImageError:
        raise BadPicture(
            "the picture is no PNG, JPEG, WebP, TIFF or GIF file; convert it to one of these"
        ) from None
    except Image.DecompressionBombError:
        raise BadPicture(
            f"the picture has over {MOST_PIXELS // 1_000_000} million pixels; make it smaller"
        ) from None
    except _UNREADABLE as error:
        raise _undecodable(error) from None
    width, height = picture.size
    if max(width, height) > MOST_RATIO * min(width, height):
        raise BadPicture(
            f"the picture has {width} x {height} pixels, and its longer side may be "
            f"{MOST_RATIO} times the shorter at most; cut it"
        )
    if picture.mode in ("I", "F"):
        raise BadPicture("the picture's samples are signed or have 32 bits; save it with 8 bits")
    if picture.format in ("JPEG", "MPO") and (scans := _scans(data)) > MOST_SCANS:
        raise BadPicture(
            f"the picture has {scans} scans, and {MOST_SCANS} are the most; save it anew"
        )
    try:
        picture.load()
        return _upright(picture)
    except _UNREADABLE as error:
        raise _undecodable(error) from None


def _scans(data: bytes) -> int:
    """The scans of a JPEG file's first picture. Each goes over all pixels, however short it is."""
    scans, at = 0, 0
    while (marker := _MARKER.search(data, at)) and marker[0] != b"\xff\xd9":
        scans += marker[0] == b"\xff\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return scans


def _upright(picture: Image.Image) -> Image.Image:
    """A loaded picture in RGB, turned as EXIF says."""
    orientation = picture.getexif().get(_ORIENTATION)
    if picture.mode.startswith("I;16"):
        # Pillow would take all above 255 as 255.
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.new("RGB", layer.size, "white")
        picture.paste(layer, mask=layer)
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    return picture.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else picture


def _undecodable(error: Exception) -> BadPicture:
    said = one_line(str(error)) or type(error).__name__
    return BadPicture(f"the picture cannot be decoded ({said}); send all bytes of its file")
