"""When a text that repeats itself ends: vLLM's ``repetition_detection``."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.request_part import RequestPart

MAX_PATTERN_SIZE = 1024


class RepetitionDetection(RequestPart):
    """Ends a text once its last tokens are one pattern, repeated.

    The fields are vLLM's, but for the last two.

    Attributes:
        max_pattern_size: tokens of a pattern, at most; 0 turns the detection off.
        min_pattern_size: tokens of a pattern, at least; 0 is 1.
        min_count: how often the pattern occurs in a row, at least.
        min_tokens: tokens of all these occurrences together, at least.
        repetition_penalty: let the text go on with this penalty, until it repeats itself again.

    >>> loops = RepetitionDetection(max_pattern_size=20, min_count=8)
    >>> producer.submit(prompt="def f(x):", repetition_detection=loops).queue
    'omlx:fake:default'
    """

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN_SIZE)
    min_pattern_size: int = Field(default=0, ge=0)
    min_count: int = Field(default=0, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=1, le=10)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest(
                "min_pattern_size", f"got {self.min_pattern_size}", "give at most max_pattern_size"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidRequest(
                "min_count",
                f"got {self.min_count}",
                "give at least 2, or max_pattern_size 0 to detect nothing",
            )
        return self

    def needed(self, size: int) -> int:
        """Tokens that a pattern of this size must cover with its repetitions."""
        return max(self.min_count * size, self.min_tokens)


LOOPS = RepetitionDetection(max_pattern_size=128, min_count=32, min_tokens=1024)
"""Longer than what a text repeats for a reason, such as a table of zeros."""
PICTURE_LOOPS = RepetitionDetection(max_pattern_size=512, min_count=4, min_tokens=1024)
"""Of texts read from pictures, which repeat whole paragraphs and tables."""
