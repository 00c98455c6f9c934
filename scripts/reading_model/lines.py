"""Lines of text as receipts have them, and their pictures."""

import random
import zlib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT_FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FONTS = {
    "Pillow's default": None,
    "DejaVu Sans": "DejaVuSans.ttf",
    "DejaVu Sans Mono": "DejaVuSansMono.ttf",
    "DejaVu Serif": "DejaVuSerif.ttf",
}
SIZES = range(22, 28)
WIDTH, HEIGHT = 256, 32
"""Of a picture, in pixels: 8 vectors."""
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
NAMES = (
    *("Bakery", "Bar", "Bistro", "Blue", "Books", "Cafe", "City", "Corner", "Diner", "Flowers"),
    *("Garage", "Garden", "Green", "Grill", "Harbour", "Hotel", "Kiosk", "Lake", "Market", "Mill"),
    *("North", "Old", "Park", "Pharmacy", "Pizza", "River", "Royal", "South", "Station", "Store"),
    *("Sushi", "Taxi", "Tools"),
)
ITEMS = (
    *(
        "bread",
        "cash",
        "chair",
        "change",
        "coffee",
        "desk",
        "dinner",
        "due",
        "fee",
        "fuel",
        "gross",
    ),
    *("juice", "lamp", "lunch", "milk", "net", "paid", "paper", "parking", "pens", "rent", "rice"),
    *("room", "soap", "sugar", "sum", "tax", "tea", "ticket", "tip", "total", "water"),
)
CURRENCIES = "$", "$", "", "", "", "EUR "


@dataclass(frozen=True, slots=True)
class Drawing:
    """A line's picture and what it was drawn with.

    picture: 8-bit gray
    centres: of the characters, in pixels from the picture's left
    """

    text: str
    font: str
    size: int
    picture: Image.Image
    centres: tuple[float, ...]


def held_out(text: str) -> bool:
    """Whether a line is one of the sixteenth that is never trained on, by its hash."""
    return zlib.crc32(text.encode()) % 16 == 0


def word(random: random.Random) -> str:
    """A name, or at times syllables that mean nothing."""
    if random.random() < 0.85:
        return random.choice(NAMES)
    syllables = (
        random.choice("bcdfghjklmnprstvwxyz")
        + random.choice("aeiou")
        + random.choice(("", "", "", "", "", *"lmnrst"))
        for _ in range(random.randint(1, 3))
    )
    return "".join(syllables).capitalize()


def shop(random: random.Random) -> str:
    return random.choice((word(random), f"{word(random)} {word(random)}"))


def item(random: random.Random) -> str:
    text = random.choice(ITEMS)
    return random.choice((text, text.capitalize())) + random.choice(("", "", ":"))


def date(random: random.Random) -> str:
    year, month, day = random.randint(1990, 2039), random.randint(1, 12), random.randint(1, 28)
    return random.choice(
        (
            f"{year}-{month:02}-{day:02}",
            f"{year}-{month:02}-{day:02}",
            f"{day:02}.{month:02}.{year}",
            f"{month:02}/{day:02}/{year % 100:02}",
            f"{day} {MONTHS[month - 1]} {year}",
        )
    )


def amount(random: random.Random) -> str:
    units = random.randrange(10 ** random.randint(1, 4))
    return f"{random.choice(CURRENCIES)}{units}.{random.randrange(100):02}"


KINDS = {
    (item, amount): 35,
    (date, amount): 20,
    (date, shop, amount): 20,
    (shop, amount): 15,
    (shop,): 3,
    (date,): 4,
    (amount,): 3,
}
"""What lines have, and how often of a hundred."""


def line(random: random.Random) -> str:
    """A line, held out or not, of any length."""
    (parts,) = random.choices(list(KINDS), list(KINDS.values()))
    return " ".join(part(random) for part in parts)


@cache
def font_of(name: str, size: int) -> ImageFont.FreeTypeFont:
    file = FONTS[name]
    if file is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(str(FONT_FOLDER / file), size)


def crowd(random: random.Random, font: ImageFont.FreeTypeFont, room: int) -> str:
    """A line that fills its picture, cut anywhere: many characters to learn from."""
    text = ""
    while font.getlength(text) <= room:
        text += random.choice((word, word, shop, date, amount, item))(random) + " "
    text = text[random.choice((0, 0, 0, 2, 4)) :].lstrip()
    while font.getlength(text) > room:
        text = text[:-1]
    return text.strip()


def draw(random: random.Random, held: bool, crowded: float = 0.0) -> Drawing:
    """Draw a line, held out or not, dark on light with a little noise.

    The share `crowded` fills its picture.
    """
    while True:
        name, size = random.choice(list(FONTS)), random.choice(SIZES)
        font = font_of(name, size)
        fills = random.random() < crowded
        left = random.randint(1, 10)
        text = crowd(random, font, WIDTH - left - 1) if fills else line(random)
        spare = int(WIDTH - font.getlength(text)) - 1
        if text and spare > 0 and held_out(text) == held:
            break
    if not fills:
        left = random.randint(1, min(spare, 12) if random.random() < 0.8 else spare)
    space = HEIGHT - int(font.getbbox("Agpy$/")[3])
    top = random.randint(min(space, 0), max(space, 0))
    paper, ink = random.randint(200, 255), random.randint(0, 80)
    picture = Image.new("L", (WIDTH, HEIGHT), paper)
    ImageDraw.Draw(picture).text((left, top), text, ink, font=font)
    if strength := random.choice((0, 4, 8, 12)):
        noise = np.random.default_rng(random.getrandbits(32))
        pixels = np.asarray(picture) + strength * noise.standard_normal((HEIGHT, WIDTH), np.float32)
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    ends = [left + font.getlength(text[:end]) for end in range(len(text) + 1)]
    centres = tuple((a + b) / 2 for a, b in pairwise(ends))
    return Drawing(text, name, size, picture, centres)
