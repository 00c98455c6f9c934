"""What mlx-lm's modules see of one recurrent layer's cache during one window.

A `RecurrentView` stands in for the layer's `ArraysCache`. `serve_recurrent_views` makes the modules
that use such a cache run once for each token to replay, with the inputs that the view kept, and
then over the window. They must be functions of their states and of a token's inputs alone, which
all of them are: the view hands them an `ArraysCache` of every row's states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.window import Window

Layer = Callable[[Sequence[mx.array], ArraysCache], Any]
"""A module's forward from its inputs ``[S, T, ...]`` to outputs ``[S, T, ...]``."""


class RecurrentView:
    """One layer's cache, for one window.

    Args:
        accepted: ``[S]`` int32, drafts accepted of each row's last window; of no use to a window
            of prompts, all of whose tokens are committed.
    """

    def __init__(self, cache: RecurrentCache, window: Window, accepted: mx.array) -> None:
        self.cache, self.window, self.accepted = cache, window, accepted
        self._past = iter(cache.kept)
        self._kept: list[mx.array] = []

    def make_mask(self, N: int) -> None:
        """Every token of a window is one of its row."""

    def run(self, layer: Layer, inputs: Sequence[mx.array]) -> Any:
        """Run a window, the accepted drafts of the last one first.

        Of a step the cache keeps the states after the window's first token, which is committed
        whatever becomes of the rest, and the inputs. A layer may run several modules, each with
        states of its own.

        Args:
            inputs: ``[S, W, ...]`` each.
        """
        cache, width = self.cache, inputs[0].shape[1]
        if self.window.lengths is not None:
            out, cache.states = _run(layer, inputs, 0, width, cache.states)
            return out
        past = list(islice(self._past, len(inputs)))
        for token in range(1, past[0].shape[1] if past else 1):
            _, after = _run(layer, past, token, token + 1, cache.states)
            replayed = token <= self.accepted
            cache.states = [
                mx.where(replayed.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(after, cache.states, strict=True)
            ]
        out, cache.states = _run(layer, inputs, 0, 1, cache.states)
        if width > 1:
            rest, _ = _run(layer, inputs, 1, width, cache.states)
            out = tree_map(lambda *parts: mx.concatenate(parts, axis=1), out, rest)
        self._kept += inputs
        cache.kept = self._kept
        return out


def _run(
    layer: Layer, inputs: Sequence[mx.array], start: int, end: int, states: Sequence[mx.array]
) -> tuple[Any, list[mx.array]]:
    """A layer's outputs for some tokens, and the states after them."""
    cache = ArraysCache(len(states))
    cache.cache = list(states)
    return layer([part[:, start:end] for part in inputs], cache), cache.cache


def serve_recurrent_views(model: nn.Module) -> None:
    """Make the model's modules accept a `RecurrentView` wherever they accept an `ArraysCache`.

    Of nested modules that take a cache, only the innermost use it.
    """
    for kind in {type(part) for _, part in model.named_modules() if _uses_cache(part)}:
        if not hasattr(kind.__call__, "__wrapped__"):
            kind.__call__ = _ragged(kind.__call__)


def _uses_cache(module: nn.Module) -> bool:
    return [part for part in module.modules() if _takes_cache(type(part))] == [module]


def _takes_cache(kind: type[nn.Module]) -> bool:
    return "cache" in inspect.signature(kind.__call__).parameters


def _ragged(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        view = given.get("cache")
        if not isinstance(view, RecurrentView):
            return plain(*args, **options)
        names = [name for name, value in given.items() if isinstance(value, mx.array)]
        inputs = [given[name] for name in names]
        if "offset" in names:
            # A row's position becomes those of its tokens.
            at = names.index("offset")
            inputs[at] = inputs[at][:, None] + mx.arange(inputs[0].shape[1])
        module, project = given["self"], None
        if "in_proj" in module and "out_proj" in module:
            # One product over the window instead of one for each run.
            inputs, project = [module.in_proj(*inputs)], module.out_proj
            given["self"] = module = copy(module)
            module.in_proj = module.out_proj = nn.Identity()

        def layer(inputs: Sequence[mx.array], cache: ArraysCache) -> Any:
            named = dict(zip(names, inputs, strict=True))
            if "offset" in named:
                named["offset"] = named["offset"][:, 0]
            return plain(**given | named | {"cache": cache})

        out = view.run(layer, inputs)
        return out if project is None else project(out)

    return forward
