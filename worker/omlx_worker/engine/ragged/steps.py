"""The compiled steps of a batch: one dispatch each, or two if a row is constrained.

The masks of constrained rows depend on the last step's outcome, which the host must read first. The
backbone's forward does not. So it is dispatched before the host reads, and only sampling waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import spans_of
from omlx_worker.engine.kernels.device import compiles
from omlx_worker.engine.kernels.window import Spans
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged.buffers import Buffers
from omlx_worker.engine.ragged.sampling import Params, Plan
from omlx_worker.engine.ragged.step import Arrays, Outcome, State, advance, commit, forward

MOST_STEPS = 48
"""Compiled steps that are kept; the least recently used go.

MLX keeps every trace of a function, a few hundred kilobytes a layer, until the function itself is
dropped, and a worker meets hundreds of layouts in a night. So each layout has its own function, of
one or two traces (1.3 on average where rows come and go and depths change).
"""


class Steps:
    """Runs steps, compiled once per sampling plan, depth and layout.

    Args:
        own_depth: drafts of a row and step, at most, that the model makes itself.

    Attributes:
        compiled: keeps the compiled functions.
        traces: how many times one was traced for a new bucket of shapes; stays 0 where nothing is
            compiled.
    """

    def __init__(self, model: RaggedModel, own_depth: int) -> None:
        self.traces = 0
        self.compiled = lru_cache(MOST_STEPS)(self._compiled)
        self._model = model
        self._own_depth = own_depth
        self._counts = compiles()

    def run(
        self,
        buffers: Buffers,
        params: Params,
        plan: Plan,
        depth: int,
        masks: Callable[[], mx.array] | None = None,
    ) -> Outcome:
        """Dispatch a step over the buffers, which then have its results.

        Args:
            depth: drafts that it leaves for the next one to judge.
            masks: called once the forward is dispatched; returns what `distribution` takes. The
                arrays of the state are computed before the forward, so it may read them.

        Returns:
            What it yields. The caller submits it.
        """
        functions = self.compiled(plan, depth, spans_of(buffers.caches), masks is not None)
        # In one order: another is another trace.
        state = dict(sorted(buffers.state.items()))
        if masks is None:
            [step] = functions
            outcome, buffers.state, written = step(state, params, buffers.arrays)
        else:
            first, second = functions
            mx.async_eval(state)
            hidden, written = first(state, buffers.arrays)
            mx.async_eval(hidden, written)
            buffers.advance(written)
            outcome, buffers.state, written = second(state, params, buffers.arrays, hidden, masks())
        buffers.advance(written)
        return Outcome(*outcome)

    def _compiled(
        self, plan: Plan, depth: int, _spans: Spans, halved: bool
    ) -> list[Callable[..., Any]]:
        # Deeper steps are for copies. There a row without a match does better without drafts than
        # all rows do with the time that the model's own take.
        own = self._own_depth if depth <= self._own_depth else 0
        model = self._model

        def whole(
            state: State, params: Params, layers: Arrays
        ) -> tuple[list[mx.array], State, Arrays]:
            caches = self._wrapped(layers)
            return _returned(*advance(model, caches, state, params, plan, depth, own), caches)

        def first(state: State, layers: Arrays) -> tuple[mx.array, Arrays]:
            caches = self._wrapped(layers)
            return forward(model, caches, state, depth), [cache.written for cache in caches]

        def second(
            state: State, params: Params, layers: Arrays, hidden: mx.array, allowed: mx.array
        ) -> tuple[list[mx.array], State, Arrays]:
            caches = self._wrapped(layers)
            commits = partial(commit, plan=plan, depth=depth, own=own, allowed=allowed)
            return _returned(*commits(model, caches, state, hidden, params), caches)

        return [mx.compile(half) for half in ((first, second) if halved else (whole,))]

    def _wrapped(self, layers: Arrays) -> list[LayerCache]:
        """The layers' caches in a function that is being traced, which is counted."""
        self.traces += self._counts
        return self._model.wrap(layers)


def _returned(
    outcome: Outcome, state: State, caches: Sequence[LayerCache]
) -> tuple[list[mx.array], State, Arrays]:
    return list(outcome), state, [cache.written for cache in caches]
