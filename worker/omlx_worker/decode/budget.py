"""Whether rows fit into memory together. Pure arithmetic: the engine says what rows cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import in_units
from omlx_worker.engine.rows.row import Size


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for weights and caches together.

    Attributes:
        limit: bytes for everything.
        weights: bytes that the model takes.
        bytes_for: see `Engine.bytes_for`.
        outside: bytes that this process takes now and the engine does not count.
    """

    limit: int
    weights: int
    bytes_for: Callable[..., int]
    outside: Callable[[], int] = lambda: 0

    def fits(self, sizes: Sequence[Size], beside: int = 0) -> bool:
        """Whether rows of these sizes can be in the batch together.

        Args:
            beside: bytes taken by anything but the weights and these rows.
        """
        return self.room(sizes, beside) >= 0

    def room(self, sizes: Sequence[Size], beside: int = 0) -> int:
        """Bytes that are left; see `fits`. Below 0 if it does not fit."""
        return self.limit - self.weights - self.outside() - self.bytes_for(sizes) - beside

    def objection(self, sizes: Sequence[Size]) -> InvalidRequest | None:
        """Why a job with rows of these sizes can never run; None if it can.

        Its rows can run one at a time, in a batch of their own.
        """
        largest = max(sizes, key=lambda size: size[1])
        needed = self.bytes_for([largest], alone=True)
        if self.weights + needed <= self.limit:
            return None
        free = in_units(max(0, self.limit - self.weights))
        pictures = "send fewer or smaller pictures, " if any(largest[4:5]) else ""
        return InvalidRequest(
            "max_completion_tokens",
            f"with its prompt the job may come to {largest[1]} tokens, which take "
            f"{in_units(needed)}; beside the model's {in_units(self.weights)} this worker has "
            f"{free} of {in_units(self.limit)} (--memory-limit)",
            f"{pictures}ask for fewer tokens or raise the limit",
        )
