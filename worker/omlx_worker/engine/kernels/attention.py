"""Attention of a window to the body and tail of every row: what each implementation offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.window import Window


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        rotate: MLX's or mlx-lm's own module, ``(x [S, H, W, D], offset=[S])``.
        dims: the first numbers of a head, which are rotated.
        periods: ``[dims / 2]`` float32; the angle is the position divided by the period. None if
            the positions are of a kind that no kernel knows.
        traditional: neighbours are pairs; otherwise the halves are.
        factor: multiplies what is rotated.
    """

    rotate: Callable[..., mx.array]
    dims: int = 0
    periods: mx.array | None = None
    traditional: bool = False
    factor: float = 1.0

    def turn(self, x: mx.array, window: Window) -> mx.array:
        """Rotate ``[S, H, W, D]`` by the positions of a window.

        Raises:
            ValueError: where each pair has its own, and the periods are not known.
        """
        if window.positions is None:
            return self.rotate(x, offset=window.turns)
        if self.periods is None or self.traditional:
            raise ValueError(f"{type(self.rotate).__name__} takes no positions of three kinds")
        pairs = self.dims // 2
        angles = window.positions[:, None].astype(mx.float32) / self.periods
        cos, sin = mx.cos(angles) * self.factor, mx.sin(angles) * self.factor
        one, other = x[..., :pairs], x[..., pairs : self.dims]
        turned = [(one * cos - other * sin), (other * cos + one * sin)]
        parts = [*(part.astype(x.dtype) for part in turned), x[..., self.dims :]]
        return mx.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class Heads:
    """From one projection to queries, keys and values: ``[S, W, (c * Hq + 2 * H) * D]``.

    The projection holds the queries, then the keys, then the values; ``c`` is 2 if every query
    head is followed by a gate, which is read elsewhere.

    Attributes:
        queries, keys: how many heads, ``Hq`` and ``H``.
        size: ``D``, of queries, keys and values.
        rope: of queries and keys.
        gated: whether gates follow the query heads.
        query_norm, key_norm: weights ``[D]`` of the norms before the rotation; None for no norms.
        epsilon: of the norms.
    """

    queries: int
    keys: int
    size: int
    rope: Rope
    gated: bool = False
    query_norm: mx.array | None = None
    key_norm: mx.array | None = None
    epsilon: float = 0.0

    def split(self, projected: mx.array, window: Window) -> tuple[mx.array, mx.array, mx.array]:
        """By MLX's operations: queries and keys, normed and rotated, and values."""
        slots, width, _ = projected.shape
        ends = [self.stride * self.queries, self.stride * self.queries + self.size * self.keys]
        queries, keys, values = (
            part.reshape(slots, width, -1, size).swapaxes(1, 2)[..., : self.size]
            for part, size in zip(
                mx.split(projected, ends, axis=-1), (self.stride, self.size, self.size), strict=True
            )
        )
        if self.query_norm is not None:
            queries = mx.fast.rms_norm(queries, self.query_norm, self.epsilon)
            keys = mx.fast.rms_norm(keys, self.key_norm, self.epsilon)
        rotated = [self.rope.turn(part, window) for part in (queries, keys)]
        return rotated[0], rotated[1], values

    def __str__(self) -> str:
        """Its kind, on which the form that computes it depends."""
        rope = self.rope
        kinds = [f"{self.queries} and {self.keys} heads of {self.size}"]
        kinds += [f"{type(rope.rotate).__name__} of {rope.dims}"]
        kinds += ["normed"] * (self.query_norm is not None) + ["gated"] * self.gated
        return ", ".join(kinds)

    @property
    def stride(self) -> int:
        """Numbers from one query head to the next."""
        return self.size * (2 if self.gated else 1)


class Attention(Protocol):
    """Writes tails, and attends to bodies and tails."""

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        """The tails with the window's keys ``[S, H, W, D]``, rotated, and values in them.

        They are finite there: a masked position has a weight of 0, and 0 * NaN is NaN.
        """
        ...

    def prepare(
        self, projected: mx.array, heads: Heads, tails: Pair, window: Window
    ) -> tuple[mx.array, Pair]:
        """Queries ``[S, Hq, W, D]``, and the tails with the window's keys and values in them.

        Args:
            projected: see `Heads`.
        """
        ...

    def attend(
        self,
        queries: mx.array,
        pool: Pool,
        tails: Pair,
        window: Window,
        scale: float,
        *,
        sliding: int = 0,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
        rotary: mx.array | None = None,
    ) -> mx.array:
        """Attend to the bodies and to the tails, which hold the window's own keys and values.

        Args:
            queries: ``[S, Hq, W, D]``, rotated; ``Hq`` is a multiple of the key heads.
            pool: the bodies.
            sliding: how many of the latest positions a query sees, its own included; 0 for all.
            sinks: ``[Hq]``, scores of a position without a value; None for none.
            softcap: the limit of scores, by a hyperbolic tangent; 0 for none.
            rotary: ``[S, Hq, W, Dv]``, for latent attention: the keys are latents, which are also
                what is mixed, and the values are the keys of these queries.

        Returns:
            ``[S, Hq, W, Dv]`` (``D`` for latents).
        """
        ...
