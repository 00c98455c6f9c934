"""One step of the ragged batch as two functions from arrays to arrays: `forward`, then `commit`.

The masks of constrained rows depend on the last step's outcome, which the host must read first.
Only `commit` needs them, so the host reads between the two.

Both take the state of a step; see `omlx_worker.engine.ragged.state`.

Every step, with drafts or without, writes the head's keys and values of the tokens it commits, so
that any later step may draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from omlx_worker.engine.caches.recurrent_cache import RecurrentCache, widened
from omlx_worker.engine.kernels.compiling import compiles
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.ragged_model import LayerCache, Layers, RaggedModel
from omlx_worker.engine.ragged.first_windows import FirstWindows
from omlx_worker.engine.ragged.lookups import BEFORE_OWN, SHORTEST, extended, look_up
from omlx_worker.engine.ragged.sampling import Params, Plan, distribution
from omlx_worker.engine.ragged.speculation import judge, propose
from omlx_worker.engine.ragged.state import State

MOST_FORWARDS, MOST_COMMITS = 240, 720
"""Compiled functions that are kept, more than `omlx_worker.engine.warm_up` lists for 128 rows: each
`forward` has a `commit` for each way to sample. The least recently used go.

MLX keeps every trace of a function until the function itself is dropped, and a worker meets
hundreds of layouts in a night. So each layout has its own functions: a `forward` of up to three
traces, some 150 kilobytes a layer each, and a `commit` of one, half a megabyte in all.
"""


class Outcome(NamedTuple):
    """What a step yields, on the device.

    Attributes:
        verdicts: ``[S, 3]`` int32, each row's drafts judged, drafts accepted and their source.
        tokens: ``[S, W]`` int32, the window's samples, of which a row's first ``accepted + 1`` are
            committed.
        logits: ``[S, W, V]``, that they were sampled from.
    """

    verdicts: mx.array
    tokens: mx.array
    logits: mx.array


class Halves:
    """`forward` and `commit`, compiled once per depth and layout; `commit` also per sampling plan.

    Args:
        own_depth: drafts of a row and step, at most, that the model makes itself.

    Attributes:
        traces: how many times one of them was traced for a new bucket of shapes; stays 0 where
            nothing is compiled.
        forwards, commits: keep the compiled functions.
        first_windows: of prompts.
    """

    def __init__(self, model: RaggedModel, own_depth: int) -> None:
        self.traces = 0
        self.forwards = lru_cache(MOST_FORWARDS)(self._forward)
        self.commits = lru_cache(MOST_COMMITS)(self._commit)
        self.first_windows = FirstWindows(model)
        self._model = model
        self._own_depth = own_depth
        self._compiles = compiles()

    def forward(self, layers: Layers, state: State, depth: int) -> tuple[mx.array, Layers]:
        """See `forward`.

        Args:
            layers: the caches' arrays.

        Returns:
            The backbone's output, and the arrays that it wrote.
        """
        run = self.forwards(depth, tuple(state["table"].shape))
        hidden, written = run(state, layers)
        return hidden, written

    def commit(
        self,
        layers: Layers,
        state: State,
        hidden: mx.array,
        params: Params,
        plan: Plan,
        depth: int,
        allowed: mx.array | None,
    ) -> tuple[Outcome, State, Layers]:
        """See `commit`; also returns all that it or `forward` wrote.

        Args:
            layers: the caches' arrays after `forward`.
        """
        run = self.commits(plan, depth, tuple(state["table"].shape))
        outcome, after, written = run(state, params, layers, hidden, allowed)
        return Outcome(*outcome), after, written

    def _forward(self, depth: int, _layout: tuple[int, ...]) -> Callable[..., Any]:
        def run(state: State, layers: Layers) -> tuple[mx.array, Layers]:
            self.traces += self._compiles
            caches = self._model.wrap(layers)
            hidden = forward(self._model, caches, state, depth)
            return hidden, [cache.written for cache in caches]

        return mx.compile(run)

    def _commit(self, plan: Plan, depth: int, _layout: tuple[int, ...]) -> Callable[..., Any]:
        # Deeper steps are for copies. There a row without a match does better without drafts than
        # all rows do with the time that the model's own take.
        own = self._own_depth if depth <= self._own_depth else 0

        def run(
            state: State, params: Params, layers: Layers, hidden: mx.array, allowed: mx.array | None
        ) -> tuple[list[mx.array], State, Layers]:
            self.traces += self._compiles
            caches = self._model.wrap(layers)
            commits = partial(commit, plan=plan, depth=depth, own=own, allowed=allowed)
            outcome, after = commits(self._model, caches, state, hidden, params)
            return list(outcome), after, [cache.written for cache in caches]

        return mx.compile(run)


def forward(model: RaggedModel, caches: list[LayerCache], state: State, depth: int) -> mx.array:
    """The backbone's output over the window, ``[S, W, hidden]``.

    Args:
        depth: drafts that the step leaves for the next one to judge.
    """
    tokens, window = _window(state)
    hidden = model.forward(tokens, caches, window, state["accepted"])
    if tokens.shape[1] == 1 and not depth:
        for cache in caches:
            if isinstance(cache, RecurrentCache):
                cache.kept = []  # the window is its first token alone, which the states include
    return hidden


def commit(
    model: RaggedModel,
    caches: list[LayerCache],
    state: State,
    hidden: mx.array,
    params: Params,
    plan: Plan,
    depth: int,
    own: int,
    allowed: mx.array | None = None,
) -> tuple[Outcome, State]:
    """Judge the drafts in the state, commit what was accepted, and draft for the next step.

    Args:
        hidden: what `forward` returned.
        depth: drafts for the next step to judge.
        own: how many of them, at most, the model drafts itself where nothing is looked up.
        allowed: see `omlx_worker.engine.ragged.sampling.distribution`.

    Returns:
        The outcome, and the new state.
    """
    cursors = state["cursors"]
    tokens, window = _window(state)
    width = tokens.shape[1]

    counts = state.get("counts")
    counted = None if counts is None else _counts_along(counts, tokens)
    target = distribution(model.logits(hidden), counted, params, plan, allowed)
    positions = cursors[:, None] + mx.arange(1, width + 1)
    emitted, accepted = judge(target, state, positions, params, plan)

    moved = cursors + (1 + accepted) * params["active"]
    pending = mx.take_along_axis(emitted, accepted[:, None], axis=1)[:, 0]
    after = {
        "pending": pending,
        "cursors": moved,
        "body_lengths": state["body_lengths"],
        "table": state["table"],
        "entries": state["entries"],
        "shifts": state["shifts"],
        "accepted": accepted,
    }
    if counts is not None:
        rows = mx.arange(counts.shape[0])[:, None]
        committed = (mx.arange(width) <= accepted[:, None]).astype(mx.int32)
        counts = after["counts"] = counts.at[rows, emitted].add(committed)
    following = mx.concatenate([tokens[:, :1], emitted], axis=1)
    shortest = BEFORE_OWN if own else SHORTEST
    own = min(own, depth)
    if own:
        after["drafts"] = propose(
            model, caches, hidden, after, own, following, window, params, plan
        )
    elif model.drafter:
        # Nothing takes the output, so only the head's keys and values are computed.
        model.drafter.draft(following, hidden, caches, window)
    after["offered"] = mx.minimum(params["depth"], own)
    after["source"] = mx.zeros_like(state["source"])
    if "history" in state:
        after["history"] = extended(state["history"], cursors, emitted)
    if "history" in state and depth:
        after |= look_up(after, params["depth"], depth, shortest)
    verdicts = mx.stack([state["offered"], accepted, state["source"]], axis=1).astype(mx.int32)
    return Outcome(verdicts, emitted, target.logits), after


def fit(state: State, caches: Sequence[LayerCache], depth: int, deepest: int) -> State:
    """The state of the last step, in the shapes of a step that drafts ``depth`` tokens.

    A step is traced for every shape: how many drafts it judges, and how many positions it may
    replay. Without this function each pair of depths adds two traces, and a short probe of another
    depth adds five, which take as long as a dozen steps (32 layers, NVIDIA H200). So drafts are cut
    or padded to ``depth``. Kept inputs are padded to the width of such a step; if they are wider,
    to that of the deepest step. A change of depth wastes the drafts that are cut.

    Args:
        state: without drafts, it gets some that no row may accept.
        caches: changed in place.
        deepest: the most that any step drafts.
    """
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            cache.fit(1 + depth, 1 + deepest)
    made = state["drafts"].shape[1] if "drafts" in state else 0
    if made == depth:
        return state
    rest = {name: array for name, array in state.items() if name != "drafts"}
    if depth:
        drafts = state.get("drafts", mx.zeros((*state["offered"].shape, 0), mx.int32))
        rest["drafts"] = widened(drafts, depth)[:, :depth]
    return rest | {"offered": mx.minimum(state["offered"], min(made, depth))}


def _window(state: State) -> tuple[mx.array, Window]:
    """The tokens of every row's window, ``[S, W]``, and where they go."""
    tokens = state["pending"][:, None]
    if "drafts" in state:
        tokens = mx.concatenate([tokens, state["drafts"]], axis=1)
    width = tokens.shape[1]
    rest = [state[name] for name in ("table", "entries", "shifts")]
    return tokens, Window.at(state["cursors"], state["body_lengths"], width, *rest)


def _counts_along(counts: mx.array, tokens: mx.array) -> mx.array:
    """Token counts of the history before each position's sample, ``[S, W, V]``.

    ``counts`` already include the window's first token, the pending one. Each draft after it counts
    from its own position on.
    """
    # Not over the drafts alone: MLX on CUDA dies of a sum along an axis without entries.
    drafted = (mx.arange(tokens.shape[1]) > 0)[:, None]
    drafts = (tokens[..., None] == mx.arange(counts.shape[-1])) & drafted
    return counts[:, None] + mx.cumsum(drafts.astype(counts.dtype), axis=1)
