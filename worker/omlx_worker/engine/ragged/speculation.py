"""Drafts and their verdict: which drafts a row accepts, and which token follows them.

Draft and target sample with the same noise, and a draft is accepted if it equals the target's
sample. So every emitted token is the target's sample: the text has the distribution of sampling
token by token, and a seed gives the same text at every depth, 0 included.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged.sampling import (
    Distribution,
    Params,
    Plan,
    distribution,
    noise,
)


def judge(
    target: Distribution,
    state: dict[str, mx.array],
    positions: mx.array,
    params: Params,
    plan: Plan,
) -> tuple[mx.array, mx.array]:
    """Accept drafts and sample the token after them.

    Args:
        target: the target's distribution at each window position.
        state: of the step, which may have ``drafts``.
        positions: ``[S, W]`` int32, the position in the history of each sample.

    Returns:
        Tokens ``[S, W]`` int32, of which a row's first ``accepted + 1`` are emitted, and the
        accepted counts ``[S]`` int32.
    """
    gumbel = _noise(params["keys"], positions, target, plan)
    tokens, offered = target.pick(gumbel), state["offered"]
    if "drafts" not in state:
        return tokens, mx.zeros_like(offered)
    depth = state["drafts"].shape[1]
    kept = (tokens[:, :depth] == state["drafts"]) & (mx.arange(depth) < offered[:, None])
    return tokens, mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1)


def propose(
    model: RaggedModel,
    caches: Sequence[LayerCache],
    hidden: mx.array,
    state: dict[str, mx.array],
    depth: int,
    tokens: mx.array,
    window: Window,
    params: Params,
    plan: Plan,
) -> mx.array:
    """Draft ``depth`` tokens for every row, after the window that was just judged.

    The head's entry at a position takes the hidden state there and the token after it. So it reads
    the whole window in one call, and deeper drafts begin at the new cursor. Its entries for
    rejected positions and for drafts deeper than one are at or past the new cursor; the next window
    overwrites them. What does not advance drafts on at the last position that was committed.

    Args:
        hidden: ``[S, W, hidden]``, the backbone's normed output of the window.
        state: after the window was committed.
        tokens: ``[S, W + 1]`` int32, the window's first token, then those from `judge`.
        window: of the tokens that ``hidden`` belongs to.

    Returns:
        The state's ``drafts``.
    """
    cursors, accepted, counts = state["cursors"], state["accepted"], state.get("counts")
    drafter = model.drafter
    assert drafter is not None
    out = drafter.draft(tokens, hidden, caches, window)
    last = mx.take_along_axis(out, accepted[:, None, None], axis=1)
    drawn: list[mx.array] = []
    for place in range(depth):
        expected = distribution(
            drafter.logits(last), None if counts is None else counts[:, None], params, plan
        )
        positions = cursors[:, None] + (1 + place)
        token = expected.pick(_noise(params["keys"], positions, expected, plan))
        drawn.append(token)
        if place + 1 < depth:
            if counts is not None:
                counts = counts.at[mx.arange(counts.shape[0]), token[:, 0]].add(1)
            at = cursors + place if drafter.advances else window.cursors + accepted
            last = drafter.draft(token, last, caches, window.starting_at(at, 1))
    return mx.concatenate(drawn, axis=1)


def _noise(keys: mx.array, positions: mx.array, of: Distribution, plan: Plan) -> mx.array | None:
    return noise(keys, positions, of.logits.shape[-1]) if plan.noise else None
