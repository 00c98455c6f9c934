"""One step of the ragged batch as a function from arrays to arrays, compiled.

The state is a dictionary of arrays with a leading axis of slots:

``pending``       the token sampled last, not in the cache yet
``cursors``       tokens in the cache, which is the pending token's position
``body_lengths``  how many of them lie in the attention bodies
``accepted``      drafts accepted in the last window, not yet replayed by recurrent layers
``drafted``       how many of ``drafts`` the row may have accepted; 0 until its first step
``drafts``        ``[S, K]``, judged by the next step; absent without drafts
``weights``       ``[S, K, V]``, what they were drawn by; only under the ``ratio`` rule
``counts``        ``[S, V]``, how often each token occurs in the history; only with penalties

The head's keys and values of the committed tokens are in its caches after every step, whether the
step drafts or not, so that the next one may draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.interface import Row
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import Window, spans_of
from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.sampling import Draw, Knobs, Plan, ReadDraw, Sampled, law, report
from omlx_worker.engine.ragged.speculation import Drafts, judge, propose

State = dict[str, mx.array]
Arrays = list[list[mx.array]]
Outcome = tuple[list[mx.array], State, Arrays]
Step = Callable[[State, Knobs, Arrays], Outcome]


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one step added to one row.

    Attributes:
        tokens: committed tokens: the accepted drafts and the one after them.
        drafted: drafts that were judged for the row.
    """

    row_id: str
    tokens: list[Sampled]
    drafted: int = 0

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Verdict:
    """A step's outcome on the device.

    Attributes:
        counts: ``[S, 2]`` int32: drafts judged and drafts accepted, of each row.
        draw: ``[S, W]``, of which a row's first ``accepted + 1`` tokens count.
    """

    counts: mx.array
    draw: Draw

    @property
    def arrays(self) -> list[mx.array]:
        return [self.counts, *self.draw.arrays]

    def read(self) -> ReadVerdict:
        """Wait for the device and bring the outcome to the host."""
        counts: list[list[int]] = self.counts.tolist()  # type: ignore[assignment]
        return ReadVerdict(counts, self.draw.read())


CompiledStep = Callable[[State, Knobs, Arrays], tuple[Verdict, State, Arrays]]


@dataclass(frozen=True, slots=True)
class ReadVerdict:
    """A `Verdict` on the host."""

    counts: list[list[int]]
    draw: ReadDraw

    def at(self, row: Row, index: int) -> RowStep:
        """What the step added to a row at its index in the batch."""
        drafted, accepted = self.counts[index]
        tokens = [self.draw.at(row, index, column) for column in range(accepted + 1)]
        return RowStep(row.row_id, tokens, drafted)


def compiled(
    model: RaggedModel,
    plan: Plan,
    depth: int,
    on_trace: Callable[[], None],
) -> CompiledStep:
    """The step for a sampling plan that leaves ``depth`` drafts for the next one to judge.

    Args:
        on_trace: called whenever the step is traced anew, for a new bucket of shapes.
    """

    def step(state: State, knobs: Knobs, layers: Arrays) -> Outcome:
        on_trace()
        caches = model.wrap(layers)
        verdict, after = advance(model, caches, state, knobs, plan, depth)
        return verdict.arrays, after, [cache.written for cache in caches]

    fused: Step = mx.compile(step)

    def run(state: State, knobs: Knobs, layers: Arrays) -> tuple[Verdict, State, Arrays]:
        (counts, *drawn), after, written = fused(state, knobs, layers)
        return Verdict(counts, Draw(*drawn)), after, written

    return run


def advance(
    model: RaggedModel,
    caches: list[LayerCache],
    state: State,
    knobs: Knobs,
    plan: Plan,
    depth: int,
) -> tuple[Verdict, State]:
    """Judge the drafts in the state, commit what was accepted, and draft for the next step."""
    drafts = Drafts(state["drafts"], state.get("weights")) if "drafts" in state else None
    cursors, body_lengths = state["cursors"], state["body_lengths"]
    tokens = state["pending"][:, None]
    if drafts is not None:
        tokens = mx.concatenate([tokens, drafts.tokens], axis=1)
    width = tokens.shape[1]
    window = Window.at(cursors, body_lengths, width, spans_of(caches))
    hidden = model.forward(tokens, caches, window, state["accepted"])
    if width == 1 and not depth:
        for cache in caches:
            if isinstance(cache, RecurrentCache):
                cache.forget()

    counts = state.get("counts")
    history = None if counts is None else _counts_along(counts, tokens)
    target = law(model.logits(hidden), history, knobs, plan)
    positions = cursors[:, None] + mx.arange(1, width + 1)
    offered = state["drafted"]
    emitted, accepted = judge(target, drafts, offered, positions, knobs, plan)

    committed = cursors + (1 + accepted) * knobs["active"]
    pending = mx.take_along_axis(emitted, accepted[:, None], axis=1)[:, 0]
    after = {
        "pending": pending,
        "cursors": committed,
        "body_lengths": body_lengths,
        "accepted": accepted,
        "drafted": mx.minimum(knobs["depth"], depth),
    }
    if counts is not None:
        rows = mx.arange(counts.shape[0])[:, None]
        counted = (mx.arange(width) <= accepted[:, None]).astype(mx.int32)
        counts = after["counts"] = counts.at[rows, emitted].add(counted)
    if depth:
        proposed = propose(
            model,
            caches,
            hidden,
            counts,
            depth,
            tokens=emitted,
            accepted=accepted,
            window=window,
            cursors=committed,
            body_lengths=body_lengths,
            knobs=knobs,
            plan=plan,
        )
        after["drafts"] = proposed.tokens
        if proposed.weights is not None:
            after["weights"] = proposed.weights
    elif model.drafts:
        # Nothing takes the output, so only the head's keys and values are computed.
        model.draft(emitted, hidden, caches, window)
    verdict = Verdict(mx.stack([offered, accepted], axis=1), report(target, emitted, plan))
    return verdict, after


def _counts_along(counts: mx.array, tokens: mx.array) -> mx.array:
    """Token counts of the history before each position's sample, ``[S, W, V]``.

    ``counts`` include the window's first token, which is pending and so already history; the
    drafts after it are counted from their own position on.
    """
    drafts = tokens[:, 1:, None] == mx.arange(counts.shape[-1])
    seen = mx.cumsum(drafts.astype(counts.dtype), axis=1)
    first = mx.zeros_like(counts)[:, None]
    return counts[:, None] + mx.concatenate([first, seen], axis=1)
