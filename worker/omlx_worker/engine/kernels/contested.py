"""The parts of a layer whose forms compete; see `omlx_worker.engine.kernels.contest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Heads
from omlx_worker.engine.kernels.contest import PLAIN, Contest
from omlx_worker.engine.kernels.delta_rule import Inputs, Kept
from omlx_worker.engine.kernels.metal.products import (
    FIXED_ROWS,
    ROWS,
    is_for,
    multiply,
    takes,
)
from omlx_worker.engine.kernels.plain.net_inputs import Projected
from omlx_worker.engine.kernels.plain.products import Product, finished, packed_product, product
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.trial import Form
from omlx_worker.engine.kernels.window import PAGE, Window, own_pages

MOST_SAMPLED = 1 << 28
"""Bytes of keys or weights that are made to compare forms; larger ones use what these use."""

MOST_POSITIONS = 32
"""Of a prompt, that are made to compare forms; longer ones use what these use.

Rows and positions are rounded up to a power of two, or each burst of prompts would be a new size.
"""

Compared = tuple[str, Callable[[], Sequence[Any]]]
"""The size of a call, and what makes arguments in whose shapes its forms are compared."""


@dataclass(frozen=True)
class Part:
    """A method whose forms compete.

    Attributes:
        name: for people.
        compared: of its arguments.
        alike: whether all kernels have the same, so that one of them competes.
        exact: whether its results are rounded once, each to its own type.
    """

    name: str
    compared: Callable[..., Compared]
    alike: bool = False
    exact: bool = False


class Contested:
    """An implementation of several: each part runs as the form that is right and fastest.

    Args:
        plain: the implementation that takes everything. What is no part is its own.
        kernels: implementations of the parts, by names.
        parts: by the names of the methods.
    """

    def __init__(
        self, plain: Any, kernels: Mapping[str, Any], contest: Contest, parts: Mapping[str, Part]
    ) -> None:
        self._plain = plain
        for method, part in parts.items():
            competing = list(kernels.items())[: 1 if part.alike else None]
            forms = {name: getattr(each, method) for name, each in [(PLAIN, plain), *competing]}
            setattr(self, method, partial(_run, contest, part, forms))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def products_of_few_rows(contest: Contest) -> Callable[..., Product]:
    """What makes a `Product` of a layer: by MLX alone, or in a contest where a GPU has another."""
    if not is_for(str(mx.device_info().get("architecture"))):
        return product
    return partial(contested_product, contest=contest)


def contested_product(layer: Any, contest: Contest, *, gated: bool = False) -> Product:
    """A layer's product; if the kernel takes the layer, few rows of it have a contest."""
    if not takes(layer):
        return product(layer, gated=gated)
    biased = "bias" in layer
    packing = {"bits": layer.bits, "group_size": layer.group_size, "gated": gated and not biased}
    forms = {PLAIN: packed_product, "kernel": multiply}
    competing = FIXED_ROWS if contest.fixed else ROWS

    def run(x: mx.array, added: mx.array | None = None) -> mx.array:
        given = x, (layer.weight, layer.scales, layer.biases), added
        if x.size // x.shape[-1] not in competing or x.dtype != layer.scales.dtype:
            return packed_product(*given, **packing)
        out: mx.array = _run(contest, PRODUCT, forms, *given, **packing)
        return out

    def run_biased(x: mx.array, added: mx.array | None = None) -> mx.array:
        return finished(run(x) + layer.bias, added, gated=gated)

    return run_biased if biased else run


def _run(
    contest: Contest, part: Part, forms: Mapping[str, Form], *given: Any, **options: Any
) -> Any:
    size, like = part.compared(*given, **options)
    return contest.run(part.name, size, forms, given, options, like=like, exact=part.exact)


def _tail(tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Compared:
    kind = f"{_heads(keys)}, values of {values.shape[3]}"
    return _size((keys.shape[0], keys.shape[2]), kind), lambda: (tails, keys, values, window)


def _projection(projected: mx.array, heads: Heads, tails: Pair, window: Window) -> Compared:
    size = _size(projected.shape, f"{heads}, {_type(projected)}")
    return size, lambda: (projected, heads, tails, window)


def _attention(
    queries: mx.array, pool: Pool, tails: Pair, window: Window, scale: float, **options: Any
) -> Compared:
    slots, query_heads, width, _ = queries.shape
    _, heads, capacity, dims = pool.arrays[0].shape
    if not pool.ring:
        capacity = 1 << window.capacity.bit_length() - 1
        while capacity * slots * heads * dims * pool.arrays[0].dtype.size > MOST_SAMPLED:
            capacity //= 2
        capacity = max(PAGE, capacity)
    used = [
        name if isinstance(value, mx.array) else f"{name} {value}"
        for name, value in sorted({**options, "ring": pool.ring}.items())
        if isinstance(value, mx.array) or value
    ]
    kind = f"{slots} rows, {width} wide, {query_heads} heads over {_heads(pool.arrays[0])}"
    kind = ", ".join([kind, f"values of {tails[1].shape[3]}", *used])

    def like() -> Sequence[Any]:
        table = own_pages(slots, -(-capacity // PAGE))
        shape = (slots, heads, capacity) if pool.ring else (table.size, heads, PAGE)
        arrays = [mx.broadcast_to(part[:1, :, :1], (*shape, part.shape[3])) for part in pool.arrays]
        return queries, Pool(arrays, pool.ring), tails, replace(window, table=table), scale

    return f"{capacity} positions, {kind}", like


def _rule(window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array) -> Compared:
    past = None if kept is None else kept.keys
    size = _size(window.values.shape, _nets(window), past)
    return size, lambda: (window, kept, _all(past, accepted), state)


def _rule_of_prompts(prompt: Inputs, log_decay: mx.array, state: mx.array) -> Compared:
    size = _size(_few_of(prompt.values.shape), _nets(prompt))
    few = partial(_few, width=False)
    return size, lambda: (Inputs(*map(_few, prompt)), _few(log_decay), few(state))


def _net_inputs(
    projected: Projected, conv: mx.array, past: mx.array | None, accepted: mx.array | None
) -> Compared:
    kind = f"{projected[0].shape[2]} of {_type(conv)}, {conv.shape[2]} of them convolved"
    shape = projected[0].shape
    if accepted is None:
        size = _size(_few_of(shape), f"{kind}, of prompts")
        few = partial(_few, width=False)
        return size, lambda: (tuple(map(_few, projected)), few(conv), past, None)
    return _size(shape, kind, past), lambda: (projected, conv, past, _all(past, accepted))


def _net_output(out: mx.array, projected: Projected) -> Compared:
    size = _size(_few_of(out.shape), f"{out.shape[2]} heads of {out.shape[3]}, {_type(out)}")
    return size, lambda: (_few(out), tuple(map(_few, projected)))


def _product(
    x: mx.array,
    weights: Sequence[mx.array],
    added: mx.array | None,
    *,
    bits: int,
    group_size: int,
    gated: bool,
) -> Compared:
    rows, length, features = x.size // x.shape[-1], x.shape[-1], weights[0].shape[0]
    kind = f"{length} to {features}, {bits} bits in groups of {group_size}, {_type(x)}"
    kind = ", ".join([kind, *["gated"] * gated, *["added"] * (added is not None)])

    def like() -> Sequence[Any]:
        few = min(features, MOST_SAMPLED * 8 // (length * bits) // 2 * 2)
        ends = few // (1 + gated)
        return (
            x,
            tuple(part[:few] for part in weights),
            None if added is None else added[..., :ends],
        )

    return f"{rows} rows, {kind}", like


ATTENTION = {
    "put": Part("tail", _tail, alike=True),
    "prepare": Part("heads and tail", _projection, alike=True),
    "attend": Part("attention", _attention),
}
"""Of an `Attention`."""

RULE = {
    "replay_and_run": Part("delta rule", _rule, exact=True),
    "read": Part("delta rule of prompts", _rule_of_prompts, exact=True),
}
"""Of a `DeltaRule`."""

NET = {"prepare": Part("net inputs", _net_inputs), "gated": Part("net output", _net_output)}
"""Of `NetOperations`."""

PRODUCT = Part("product", _product)
"""Of a layer with packed weights."""


def _size(shape: Sequence[int], kind: str, past: mx.array | None = None) -> str:
    """The size of a window.

    Args:
        shape: slots, width and whatever follows.
        past: the window before it, ``[S, W, ...]``, if its drafts may be replayed.
    """
    replayed = [] if past is None else [f"{past.shape[1] - 1} replayed"]
    return ", ".join([f"{shape[0]} rows", f"{shape[1]} wide", *replayed, kind])


def _all(past: mx.array | None, accepted: mx.array) -> mx.array:
    """Drafts accepted, if all of the window ``past`` ``[S, W, ...]`` were."""
    return mx.full(accepted.shape, past.shape[1] - 1 if past is not None else 0, accepted.dtype)


def _few_of(shape: Sequence[int], *, width: bool = True) -> list[int]:
    """The shape in which the forms of a prompt's window are compared.

    Args:
        shape: ``[S, W, ...]``, or ``[S, ...]`` without ``width``.
    """
    few = [1 << (size - 1).bit_length() for size in shape[: 1 + width]]
    if width:
        few[1] = min(few[1], MOST_POSITIONS)
    return [*few, *shape[1 + width :]]


def _few(array: mx.array, *, width: bool = True) -> mx.array:
    return mx.zeros(_few_of(array.shape, width=width), array.dtype)


def _heads(array: mx.array) -> str:
    """Of ``[S, H, W, D]``."""
    return f"{array.shape[1]} of {array.shape[3]}, {_type(array)}"


def _nets(window: Inputs) -> str:
    keys, values = window.keys.shape[2:], window.values.shape[2:]
    return f"{keys[0]} heads of {keys[1]} and {values[0]} of {values[1]}, {_type(window.keys)}"


def _type(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")
