"""Attention of a window to body and tail as one GPU kernel, and what comes before it as another.

The other one norms and rotates queries and keys and writes the tail (`AttentionKernel.prepare`);
where a family does that itself, a third one writes the tail alone (`AttentionKernel.put`).

Of attention, a block has one key head of one slot. Its warps share out the queries, a tile at most
each, and the positions. A few lanes hold a key and all queries of the tile in registers, so a warp
takes several positions at once. Each lane group keeps a running maximum, the sum of weights and the
weighted values (online softmax); these are joined within the warp, then within the block. Where the
bodies are long and blocks few, several blocks share the positions, and a second kernel joins their
parts.

Only positions that a row has are read, whatever the capacity of its body. Weights and sums are
float32.

CUDA and Metal have the same body; it has NOT been run on Metal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Heads
from omlx_worker.engine.kernels.attention_source import JOIN, PUT, attend, finite, prepare
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.source import IN_A_NAME, Platform, launch, source
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window

SIMD = 32
"""Lanes of a warp."""

WARPS = 8
"""Warps of a block; fewer where their sums would not fit `SHARED`."""

SHARED = {"cuda": 48 << 10, "metal": 32 << 10}
"""Bytes that the warps of a block can share."""

EACH = 16
"""Numbers of a vector in a lane, if the head's size allows."""

LEAST = 256
"""Positions of a block, at least."""


def lanes_for(size: int) -> int | None:
    """Lanes that share a vector of this size; None if the kernel does not take it."""
    fitting = [lanes for lanes in (4, 8, 16, 32) if size % (4 * lanes) == 0]
    few = [lanes for lanes in fitting if size // lanes <= EACH]
    return few[0] if few else fitting[-1] if fitting and size // fitting[-1] <= 2 * EACH else None


def _check(keys: int, values: int) -> None:
    """Raise a ValueError if the kernels do not take heads of these sizes."""
    if keys != values or lanes_for(keys) is None:
        raise ValueError(f"it does not take key heads of {keys} and value heads of {values}")


def _largest(dtype: mx.Dtype) -> float:
    return float(mx.finfo(dtype).max)


@dataclass(frozen=True)
class AttentionKernel:
    """The `Attention` that launches the kernels.

    Args:
        tile: queries of a warp, at most; with its sum one takes twice `EACH` registers.
        blocks: that keep a GPU busy; with fewer, several share a row's positions.
        fixed: share out a row's positions to the same number of blocks, whatever its body's
            capacity, so that its sums depend on nothing but the row.

    Raises:
        ValueError: if they do not take what they are given.
    """

    platform: Platform
    tile: int = 4
    blocks: int = 256
    fixed: bool = False

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        size = keys.shape[-1]
        _check(size, values.shape[-1])
        threads, dtype = size // 4, tails[0].dtype
        inputs = {"tail_keys": tails[0], "tail_values": tails[1]}
        inputs |= {"keys": keys.astype(dtype), "values": values.astype(dtype)}
        new_keys, new_values = launch(
            self.platform,
            "attention_put",
            source(self.platform, finite(PUT, _largest(dtype))),
            inputs | {"places": window.places},
            dict.fromkeys(("new_keys", "new_values"), (tails[0].shape, dtype)),
            {"T": dtype, "D": size},
            grid=(threads, TAIL, keys.shape[0] * keys.shape[1]),
            threadgroup=(threads, 1 << max(0, (128 // threads).bit_length() - 1), 1),
        )
        return new_keys, new_values

    def prepare(
        self, projected: mx.array, heads: Heads, tails: Pair, window: Window
    ) -> tuple[mx.array, Pair]:
        slots, width, total = projected.shape
        dtype, rope = projected.dtype, heads.rope
        _check(heads.size, tails[1].shape[-1])
        if tails[0].dtype != dtype:
            raise ValueError(f"it does not write {dtype} to a tail of {tails[0].dtype}")
        if rope.periods is None:
            raise ValueError(f"it does not know the positions of {type(rope.rotate).__name__}")
        inputs = {"projected": projected, "tail_keys": tails[0], "tail_values": tails[1]}
        inputs |= {"places": window.places, "periods": rope.periods}
        normed = heads.query_norm is not None
        if heads.query_norm is not None and heads.key_norm is not None:
            inputs |= {"query_norm": heads.query_norm, "key_norm": heads.key_norm}
        epsilon = heads.epsilon if normed else None
        name = f"attention_prepare_{float(rope.factor).hex()}_{epsilon and epsilon.hex()}_{dtype}"
        vectors = heads.queries * width + heads.keys * TAIL
        queries, *written = launch(
            self.platform,
            name.translate(IN_A_NAME),
            source(self.platform, prepare(_largest(dtype), factor=rope.factor, epsilon=epsilon)),
            inputs,
            {"queries": ((slots, heads.queries, width, heads.size), dtype)}
            | dict.fromkeys(("new_keys", "new_values"), (tails[0].shape, dtype)),
            {
                "T": dtype,
                "D": heads.size,
                "Hq": heads.queries,
                "H": heads.keys,
                "Stride": heads.stride,
                "Total": total,
                "Turned": rope.dims,
                "Traditional": rope.traditional,
                "Simd": SIMD,
            },
            grid=(SIMD, -(-vectors // WARPS) * WARPS, slots),
            threadgroup=(SIMD, WARPS, 1),
        )
        return queries, (written[0], written[1])

    def attend(
        self,
        queries: mx.array,
        pool: Pool,
        tails: Pair,
        window: Window,
        scale: float,
        **options: Any,
    ) -> mx.array:
        if options.pop("rotary", None) is not None:
            raise ValueError("it does not take latents")
        _check(queries.shape[-1], tails[1].shape[-1])
        names = ("queries", "tail_keys", "tail_values", "places", "body_keys", "body_values")
        given = dict(zip(names, [queries, *tails, window.places, *pool.arrays], strict=True))
        capacity = pool.length
        if not pool.ring:
            given["table"], capacity = window.table, window.capacity
        return self._attend(given, capacity, scale, ring=pool.ring, **options).swapaxes(1, 2)

    def _attend(
        self,
        given: dict[str, mx.array],
        capacity: int,
        scale: float,
        *,
        ring: int,
        sliding: int = 0,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
    ) -> mx.array:
        """Attend to bodies of ``capacity`` and tails: ``[S, W, Hq, D]``."""
        queries = given["queries"]
        slots, query_heads, width, size = queries.shape
        heads = given["body_keys"].shape[1]
        count = query_heads // heads * width
        tile = -(-count // -(-count // self.tile))
        tiles = -(-count // tile)
        warps = WARPS
        while warps * tile * 4 * (size + 2) > SHARED[self.platform]:
            warps //= 2
        blocks = slots * heads * -(-tiles // warps)
        most = self.blocks // blocks
        splits = max(1, most if self.fixed else min(capacity // LEAST, most))
        each = slots * heads * count
        mixed = {"mixed": ((slots, width, query_heads, size), queries.dtype)}
        parts = {
            "partly": ((each, splits, size), mx.float32),
            "weighed": ((each, splits, 2), mx.float32),
        }
        shape = {"T": given["body_keys"].dtype, "TQ": queries.dtype, "D": size}
        has = {"sinks": sinks is not None, "parts": splits > 1, "paged": not ring}
        name = "_".join(["attention", *(part for part, there in has.items() if there)])
        factors = f"_{float(scale).hex()}_{float(softcap).hex()}".translate(IN_A_NAME)
        made = launch(
            self.platform,
            name + factors,
            source(self.platform, attend(float(scale), softcap=softcap, **has)),
            given | ({} if sinks is None else {"sinks": sinks}),
            parts if splits > 1 else mixed,
            {
                **shape,
                "Lanes": lanes_for(size),
                "Simd": SIMD,
                "Warps": warps,
                "Tile": tile,
                "Sliding": sliding,
                "Ring": ring,
                "Page": PAGE,
            },
            grid=(SIMD, warps * splits * -(-tiles // warps), slots * heads),
            threadgroup=(SIMD, warps, 1),
        )
        if splits == 1:
            return made[0]
        shapes = {name: given[name] for name in ("queries", "body_keys")}
        (joined,) = launch(
            self.platform,
            "attention_join",
            source(self.platform, JOIN),
            shapes | dict(zip(parts, made, strict=True)),
            mixed,
            shape,
            grid=(size, 1, each),
            threadgroup=(size, 1, 1),
        )
        return joined
