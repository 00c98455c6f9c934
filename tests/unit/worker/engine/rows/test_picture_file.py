"""Bytes of any file become an upright picture in RGB, or one sentence about what is wrong."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omlx_worker.engine.rows.picture_file import BadPicture, pixels_of, size_of

FORMATS = ["PNG", "JPEG", "WEBP", "TIFF", "GIF"]


def drawn(width: int = 24, height: int = 16) -> Image.Image:
    """Red above on the left, blue elsewhere."""
    picture = Image.new("RGB", (width, height), (0, 0, 250))
    picture.paste((250, 0, 0), (0, 0, (width + 1) // 2, (height + 1) // 2))
    return picture


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes], kind: int = 0) -> bytes:
    """A file of one white pixel that says it has more.

    Args:
        kind: of colours, 3 for those of a palette.
    """
    header = struct.pack(">2I5B", width, height, 8, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0\xff")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def gif_of_a_frame(width: int, height: int) -> bytes:
    """A file of one pixel whose only frame says it has more, and is to be cleared behind it."""
    cleared = b"\x21\xf9\x04\x08" + bytes(4)
    frame = b"\x2c" + struct.pack("<4HB", 0, 0, width, height, 0)
    screen = struct.pack("<2H3B", 1, 1, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + cleared + frame + b"\x02\x02\x4c\x01\x00\x3b"


def tiff_of_a_tile(width: int, height: int) -> bytes:
    """A file of 16 pixels each way that are cut out of one packed tile."""
    tile = zlib.compress(bytes(256))
    values = (16, 16, 8, 8, 1, 1, width, height, 134, len(tile))
    tags = (256, 257, 258, 259, 262, 277, 322, 323, 324, 325)
    entries = (struct.pack("<2H2I", tag, 4, 1, n) for tag, n in zip(tags, values, strict=True))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", 10) + b"".join(entries) + bytes(4) + tile


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_of_each_format_is_decoded(kind: str) -> None:
    data = saved(drawn(), kind)

    picture = pixels_of(data)

    assert (picture.mode, picture.size, size_of(data)) == ("RGB", (24, 16), (24, 16))
    assert np.abs(np.asarray(picture, int) - np.asarray(drawn(), int)).mean() < 8


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_picture_is_set_upright(kind: str) -> None:
    # Where the standard says that an orientation's first row and column are.
    corners = ["top left", "top right", "bottom right", "bottom left"]
    for orientation, corner in enumerate(corners * 2, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = saved(drawn(), kind, exif=exif)
        picture = pixels_of(data)
        width, height = picture.size
        assert picture.size == size_of(data) == ((24, 16) if orientation < 5 else (16, 24))
        at = width - 3 if "right" in corner else 2, height - 3 if "bottom" in corner else 2
        reds = [
            point
            for point in ((x, y) for x in (2, width - 3) for y in (2, height - 3))
            if picture.getpixel(point)[0] > 125
        ]
        assert reds == [at], f"orientation {orientation}"


def test_transparent_places_are_white() -> None:
    layer = drawn().convert("RGBA")
    layer.putalpha(Image.new("L", layer.size, 0))
    half = drawn().convert("LA")
    half.putalpha(Image.new("L", half.size, 128))
    palette = drawn().convert("P")

    assert pixels_of(saved(layer)).getcolors() == [(24 * 16, (255, 255, 255))]
    assert pixels_of(saved(half)).getpixel((0, 0)) == (165, 165, 165)
    key = palette.getpixel((0, 0))
    for kind in ("PNG", "GIF"):
        cut = pixels_of(saved(palette, kind, transparency=key))
        assert cut.getpixel((0, 0)) == (255, 255, 255)
        assert cut.getpixel((23, 15)) == palette.convert("RGB").getpixel((23, 15))


def test_palettes_inks_and_bits_become_colours() -> None:
    assert (
        pixels_of(saved(drawn().convert("P"))).tobytes()
        == drawn().convert("P").convert("RGB").tobytes()
    )
    inks = pixels_of(saved(drawn().convert("CMYK"), "JPEG", quality=100))
    assert np.abs(np.asarray(inks, int) - np.asarray(drawn(), int)).max() < 9
    assert pixels_of(saved(drawn().convert("1"))).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_upper_eight(kind: str) -> None:
    data = saved(Image.fromarray(np.array([[0, 255, 256, 40_000, 65_535]], np.uint16)), kind)

    assert np.asarray(pixels_of(data))[0, :, 0].tolist() == [0, 0, 1, 156, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_picture(kind: str) -> None:
    second = Image.new("RGB", (24, 16), (0, 250, 0))

    picture = pixels_of(saved(drawn(), kind, save_all=True, append_images=[second]))

    assert np.abs(np.asarray(picture, int) - np.asarray(drawn(), int)).mean() < 8


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1)])
def test_a_picture_may_be_one_pixel_wide(size: tuple[int, int]) -> None:
    assert pixels_of(saved(drawn(*size))).size == size_of(saved(drawn(*size))) == size


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # the module's own filter, undone by pytest
@pytest.mark.parametrize("part", [0.03, 0.5, 0.9])
def test_a_file_that_was_cut_is_refused(kind: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    data = saved(Image.fromarray(noise), kind)

    with pytest.raises(BadPicture, match=r"^the picture (is no PNG|cannot be decoded)"):
        size_of(data[: int(part * len(data))])


def scanned(times: int) -> bytes:
    """A JPEG file with its last scan repeated."""
    data = saved(drawn(), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * (times - 1) + data[-2:]


def test_scans_are_those_of_the_picture_alone() -> None:
    thumbnail = saved(drawn(), "JPEG", exif=b"Exif\0\0" + b"\xff\xda" * 200)

    assert size_of(thumbnail) == (24, 16)
    assert size_of(scanned(1) + b"\xff\xda" * 200) == (24, 16)


BOMB = (b"zTXt", b"a\0\0" + zlib.compress(b"\0" * (1 << 27), 9))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the picture is empty; send all bytes of its file"),
        (b"<svg/>", "the picture is no PNG, JPEG, WebP, TIFF or GIF file; convert it to one"),
        (saved(drawn(), "BMP"), "the picture is no PNG, JPEG, WebP, TIFF or GIF file"),
        (png(8001, 8000), "the picture has over 64 million pixels; make it smaller"),
        (png(1 << 30, 1 << 30), "the picture has over 64 million pixels; make it smaller"),
        (gif_of_a_frame(8001, 8000), "the picture has over 64 million pixels; make it smaller"),
        (tiff_of_a_tile(8000, 8001), "the picture has over 64 million pixels; make it smaller"),
        (png(1, 201), "the picture has 1 x 201 pixels, and its longer side may be 200 times the"),
        (png(8, 8), "the picture cannot be decoded (image file is truncated"),
        (png(1, 1, BOMB), "the picture cannot be decoded (Decompressed data too large"),
        (png(1, 1, kind=3), "the picture cannot be decoded (AssertionError"),
        (
            png(1, 1, (b"PLTE", b"abc"), (b"tRNS", b"\1" * 300), kind=3),
            "the picture cannot be decoded (palette index out of range",
        ),
        (scanned(200), "the picture has 209 scans, and 100 are the most; save it anew"),
        (saved(drawn().convert("F"), "TIFF"), "the picture's samples are signed or have 32 bits"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value.replace(" ", "-")[12:40],
)
def test_what_is_no_picture_is_refused_in_a_sentence(data: bytes, said: str) -> None:
    for look in (size_of, pixels_of):
        with pytest.raises(BadPicture) as refused:
            look(data)
        assert str(refused.value).startswith(said)
        assert "\n" not in str(refused.value)
