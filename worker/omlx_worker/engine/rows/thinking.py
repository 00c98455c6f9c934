"""Which tokens of a row are thinking. This module imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the tokens of a row tell its thinking.

    Attributes:
        start, end: the tokens of the markers.
        begun: whether the prompt has opened the thinking.
        budget: tokens of thinking, at most, markers not counted; None without a limit.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False
    budget: int | None = None


class Thoughts:
    """Follows the thinking of one row, token by token.

    `omlx_worker.engine.ragged.thinking` does the same on the device.

    Attributes:
        on: whether the row thinks now.
        tokens: of its thinking so far, without markers that are complete.
        matched: how many tokens of the next marker the last tokens are.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self.on = thinking.begun
        self.tokens = self.matched = 0

    def feed(self, token: int) -> None:
        marker = self._thinking.end if self.on else self._thinking.start
        self.tokens += self.on
        goes_on = token == marker[self.matched]
        self.matched = self.matched + 1 if goes_on else int(token == marker[0])
        if self.matched == len(marker):
            self.tokens -= len(marker) * self.on
            self.on, self.matched = not self.on, 0
