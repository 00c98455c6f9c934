"""The parts of a layer whose forms compete; see `omlx_worker.engine.kernels.contest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.attention import Attention, Heads, Pair
from omlx_worker.engine.kernels.contest import Contest, Form
from omlx_worker.engine.kernels.cuda.products import MOST_ROWS, multiply, takes
from omlx_worker.engine.kernels.delta_rule import DeltaRule, Inputs, Kept
from omlx_worker.engine.kernels.net_kernels import NetKernels
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations, Projected
from omlx_worker.engine.kernels.plain.products import Product, product
from omlx_worker.engine.kernels.window import Window

MOST_SAMPLED = 1 << 28
"""Bytes of keys that are made to compare forms; bodies with more use what these use."""

MOST_POSITIONS = 32
"""Of a prompt, that are made to compare forms; longer ones use what these use.

Rows and positions are rounded up to a power of two, or each burst of prompts would be a new size.
"""


def _forms(plain: Any, kernel: Any, method: str) -> tuple[Form, dict[str, Form]]:
    """A method of both."""
    return getattr(plain, method), {"kernel": getattr(kernel, method)}


@dataclass(frozen=True)
class ContestedAttention:
    """An `Attention` of several.

    Attributes:
        kernels: by names. They differ in `Attention.attend` alone.
    """

    plain: Attention
    kernels: Mapping[str, Attention]
    contest: Contest

    @property
    def _any(self) -> Attention:
        return next(iter(self.kernels.values()))

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        size = f"{_rows(keys)}, {keys.shape[1]} heads of {_head(keys)}"
        forms = _forms(self.plain, self._any, "put")
        out: Pair = self.contest.run("tail", size, *forms, tails, keys, values, window)
        return out

    def prepare(
        self, projected: mx.array, heads: Heads, tails: Pair, window: Window
    ) -> tuple[mx.array, Pair]:
        slots, width, _ = projected.shape
        size = f"{slots} x {width}, {heads}"
        forms = _forms(self.plain, self._any, "prepare")
        given = projected, heads, tails, window
        out: tuple[mx.array, Pair] = self.contest.run("heads and tail", size, *forms, *given)
        return out

    def attend(
        self,
        queries: mx.array,
        bodies: Sequence[Pair],
        tails: Pair,
        window: Window,
        scale: float,
        **options: Any,
    ) -> mx.array:
        slots, query_heads, _, _ = queries.shape
        longest = max(bodies, key=lambda body: body[0].shape[2])
        _, heads, capacity, _ = longest[0].shape
        capacity = 1 << capacity.bit_length() - 1
        position = slots * heads * longest[0].shape[3] * longest[0].dtype.size
        while capacity * position > MOST_SAMPLED:
            capacity //= 2
        body = tuple(
            mx.broadcast_to(part[:1, :, :1], (slots, heads, capacity, part.shape[3]))
            for part in longest
        )
        like = queries, [body], tails, replace(window, spans=((slots, capacity),)), scale, options
        size = f"{_rows(queries)}, {capacity} positions, {query_heads} and {heads} heads of "
        size += ", ".join([_head(queries), *sorted(_given(options))])
        forms = {name: partial(_attended, kernel) for name, kernel in self.kernels.items()}
        plain = partial(_attended, self.plain)
        given = queries, bodies, tails, window, scale, options
        out: mx.array = self.contest.run("attention", size, plain, forms, *given, like=like)
        return out


def _attended(attention: Attention, *given: Any) -> mx.array:
    """`Attention.attend` with its options as the last argument."""
    *arrays, options = given
    return attention.attend(*arrays, **options)


@dataclass(frozen=True)
class ContestedRule:
    """A `DeltaRule` of two."""

    plain: DeltaRule
    kernel: DeltaRule
    contest: Contest

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        slots, width, heads, _ = window.values.shape
        past = f" after {kept.keys.shape[1]}" if kept else ""
        size = f"{slots} x {width}{past}, {heads} heads of {_head(window.values)}"
        forms = _forms(self.plain, self.kernel, "replay_and_run")
        like = window, kept, _all(kept.keys if kept else None, accepted), state
        given = window, kept, accepted, state
        out: tuple[mx.array, mx.array] = self.contest.run(
            "delta rule", size, *forms, *given, like=like
        )
        return out

    def read(
        self, prompt: Inputs, log_decay: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        heads = prompt.values.shape[2]
        like = Inputs(*map(_like, prompt)), _like(log_decay), _like(state, width=False)
        size = f"{_size(like[1])} and more, {heads} heads of {_head(prompt.values)}"
        forms = _forms(self.plain, self.kernel, "read")
        given = prompt, log_decay, state
        out: tuple[mx.array, mx.array] = self.contest.run(
            "delta rule of prompts", size, *forms, *given, like=like
        )
        return out


class ContestedNet(NetOperations):
    """`NetOperations` beside `NetKernels`."""

    def __init__(
        self, module: Any, fused: Product, kernels: NetKernels | NetOperations, contest: Contest
    ) -> None:
        super().__init__(module, fused)
        self._plain = NetOperations(module, fused)
        self._kernels = kernels
        self._contest = contest

    def prepare(
        self, projected: Projected, conv: mx.array, past: mx.array | None, accepted: mx.array | None
    ) -> tuple[Inputs, mx.array]:
        few, before = projected, conv
        if accepted is None:
            few, before = tuple(map(_like, projected)), _like(conv, width=False)
        size = f"{_size(few[0])}, {self._module.num_v_heads} heads"
        size += f" after {past.shape[1]}" if past is not None else ""
        size += " of prompts" if accepted is None else ""
        forms = _forms(self._plain, self._kernels, "prepare")
        given = projected, conv, past, accepted
        like = few, before, past, None if accepted is None else _all(past, accepted)
        out: tuple[Inputs, mx.array] = self._contest.run(
            "net inputs", size, *forms, *given, like=like
        )
        return out

    def gated(self, out: mx.array, projected: Projected) -> mx.array:
        few = _like(out), tuple(map(_like, projected))
        size = f"{_size(few[0])}, {self._module.num_v_heads} heads"
        forms = _forms(self._plain, self._kernels, "gated")
        given = out, projected
        gated: mx.array = self._contest.run("net output", size, *forms, *given, like=few)
        return gated


def contested_product(layer: Any, contest: Contest, *, gated: bool = False) -> Product:
    """The plain product of a layer beside CUDA's of few rows, where that takes the layer."""
    by_mlx = product(layer, gated=gated)
    if not takes(layer):
        return by_mlx
    kernels = {"kernel": partial(multiply, layer.weight, gated=gated)}

    def run(x: mx.array, added: mx.array | None = None) -> mx.array:
        rows = x.size // x.shape[-1]
        if rows > MOST_ROWS or x.dtype != mx.bfloat16:
            return by_mlx(x, added)
        features, length = layer.weight.shape
        how = f"{', gated' if gated else ''}{', added' if added is not None else ''}"
        size = f"{rows} x {length} to {features}{how}"
        out: mx.array = contest.run("product", size, by_mlx, kernels, x, added)
        return out

    return run


def _all(past: mx.array | None, accepted: mx.array) -> mx.array:
    """Drafts accepted, if all of the window ``past`` ``[S, W, ...]`` were."""
    return mx.full(accepted.shape, past.shape[1] - 1 if past is not None else 0, accepted.dtype)


def _like(array: mx.array, *, width: bool = True) -> mx.array:
    """An array of the shape in which a window's forms are compared.

    Args:
        array: ``[S, W, ...]``, or ``[S, ...]`` without ``width``.
    """
    shape = list(array.shape)
    for axis in range(1 + width):
        shape[axis] = 1 << (shape[axis] - 1).bit_length()
    if width:
        shape[1] = min(shape[1], MOST_POSITIONS)
    return mx.zeros(shape, array.dtype)


def _size(array: mx.array) -> str:
    """Slots and width of ``[S, W, ...]``."""
    return f"{array.shape[0]} x {array.shape[1]}"


def _rows(heads: mx.array) -> str:
    """Slots and width of ``[S, H, W, D]``."""
    return f"{heads.shape[0]} x {heads.shape[2]}"


def _head(array: mx.array) -> str:
    return f"{array.shape[-1]}, {str(array.dtype).removeprefix('mlx.core.')}"


def _given(options: Mapping[str, Any]) -> Iterator[str]:
    """The options of an attention that are in use."""
    for name, value in options.items():
        if isinstance(value, mx.array):
            yield name
        elif value:
            yield f"{name} {value}"
