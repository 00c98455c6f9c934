"""Which tokens of a row are thinking. This module imports no MLX."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Follows the thinking of one row, token by token, and holds it to its budget.

    All of it follows from the row's own tokens. So the end marker comes at one place in any
    company, at any depth and after any crash.

    Attributes:
        on: whether the row thinks now.
        tokens: of its thinking so far, without markers that are complete.
        matched: how many tokens of the next marker the last tokens are.
    """

    def __init__(self, thinking: Thinking, generated: Iterable[int] = ()) -> None:
        self._thinking = thinking
        self.on = thinking.begun
        self.tokens = self.matched = 0
        self.commit(generated)

    def commit(self, tokens: Iterable[int]) -> None:
        """Take the row's next tokens."""
        for token in tokens:
            self.feed(token)

    def feed(self, token: int) -> None:
        marker = self._thinking.end if self.on else self._thinking.start
        self.tokens += self.on
        goes_on = token == marker[self.matched]
        self.matched = self.matched + 1 if goes_on else int(token == marker[0])
        if self.matched == len(marker):
            self.tokens -= len(marker) * self.on
            self.on, self.matched = not self.on, 0

    @property
    def forced(self) -> int | None:
        """The only token that may come next: one of the end marker, at the budget; None for any."""
        return self._thinking.end[self.matched] if self.on and self.nears_budget(0) else None

    def nears_budget(self, tokens: int) -> bool:
        """Whether a token may be forced after the next ``tokens``."""
        budget = self._thinking.budget
        return budget is not None and self.tokens + tokens >= budget
