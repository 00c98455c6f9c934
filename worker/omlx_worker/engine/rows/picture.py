"""Pictures of a prompt, and what preparing one needs of the model. This module imports no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, shake_128
from typing import Protocol


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt. Its vectors stand in place of tokens there.

    Attributes:
        start: the place of its first vector in the prompt.
        rows, columns: of its vectors.
        data: the bytes of its file.
        spatial: whether its vectors are rotated by time, height and width, and what follows goes on
            after the largest of these; else by their places.
        both_ways: whether its vectors see one another, so that one window reads all of them.
    """

    start: int
    rows: int
    columns: int
    data: bytes = field(repr=False)
    spatial: bool = False
    both_ways: bool = False

    @property
    def count(self) -> int:
        """Its vectors."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The place after its last vector."""
        return self.start + self.count

    @property
    def span(self) -> int:
        """Rotary positions that it takes."""
        return max(self.rows, self.columns) if self.spatial else self.count

    @cached_property
    def digest(self) -> bytes:
        """Tells it from any other picture."""
        return blake2b(self.data, digest_size=16).digest()

    @cached_property
    def key(self) -> list[int]:
        """Numbers that stand for its vectors in the prefix cache: no token has their top bit."""
        drawn = memoryview(shake_128(self.digest).digest(4 * self.count)).cast("I")
        return [number | 1 << 31 for number in drawn]


def key_of(prompt: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """A prompt as the prefix cache knows it: pictures by their digests."""
    key = list(prompt)
    for picture in pictures:
        key[picture.start : picture.end] = picture.key
    return key


class Sight(Protocol):
    """How a model takes pictures, as far as prompts show it.

    Attributes:
        token: the id that stands in a prompt where a vector goes.
        around: ids before and after the vectors of a picture that the template does not write.
        most: vectors of one picture, at most.
        spatial, both_ways: see `Picture`.
    """

    token: int
    around: tuple[tuple[int, ...], tuple[int, ...]]
    most: int
    spatial: bool
    both_ways: bool

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the vectors of a picture with this size in pixels."""
        ...
