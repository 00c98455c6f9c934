"""Drafts and their verdict: which drafts a row accepts, and which token follows them.

Under both rules the text has the distribution of sampling token by token from the target:

``coupled``  Draft and target sample with the same noise. A draft is accepted if it equals the
             target's sample. Every emitted token is the target's sample, so a seed gives the
             same text at every depth, 0 included.
``ratio``    A draft ``d`` from a distribution ``q`` is accepted with probability
             ``min(1, p(d)/q(d))``, where ``p`` is the target's. On rejection the token is sampled
             from ``max(p - q, 0)``, normalised (Leviathan et al. 2023, Chen et al. 2023).
             Accepts more often than ``coupled``.

At temperature 0 both distributions are one token, and the rules are the same.
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
    uniform,
)

_DRAFT_STREAM = 0x9E3779B9
_VERDICT_STREAM = 0x7F4A7C15


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
    drafts = state["drafts"]
    depth = drafts.shape[1]
    places = mx.arange(depth)
    agrees = tokens[:, :depth] == drafts
    if plan.ratio:
        survives, instead = _judge_by_ratio(target, state, gumbel, positions, params)
        agrees = mx.where(params["ratio"], survives, agrees)
    kept = agrees & (places < offered[:, None])
    accepted = mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1)
    if plan.ratio:
        rejected = (places == accepted[:, None]) & (places < offered[:, None])
        replaced = mx.where(rejected & params["ratio"], instead, tokens[:, :depth])
        replaced = mx.where(places < accepted[:, None], drafts, replaced)
        tokens = mx.concatenate([replaced, tokens[:, depth:]], axis=1)
    return tokens, accepted


def _judge_by_ratio(
    target: Distribution,
    state: dict[str, mx.array],
    gumbel: mx.array | None,
    positions: mx.array,
    params: Params,
) -> tuple[mx.array, mx.array]:
    """Whether each draft is accepted ``[S, K]``, and the token to take otherwise."""
    assert target.weights is not None
    assert gumbel is not None
    chosen = state["drafts"][..., None]
    depth = chosen.shape[1]
    p = mx.softmax(target.weights[:, :depth], axis=-1)
    q = mx.softmax(state["weights"], axis=-1)
    p_chosen = mx.take_along_axis(p, chosen, axis=-1)[..., 0]
    q_chosen = mx.take_along_axis(q, chosen, axis=-1)[..., 0]
    u = uniform(_stream(params["keys"], _VERDICT_STREAM), positions[:, :depth])
    residual = mx.maximum(p - q, 0)
    # Where rounding leaves no residual, p equals q: sample from p.
    residual = mx.where(residual.max(axis=-1, keepdims=True) > 0, residual, p)
    instead = mx.argmax(mx.log(residual) + gumbel[:, :depth], axis=-1).astype(mx.int32)
    return u * q_chosen < p_chosen, instead


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
) -> dict[str, mx.array]:
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
        The state's ``drafts``, and with the ratio rule their ``weights``.
    """
    cursors, accepted, counts = state["cursors"], state["accepted"], state.get("counts")
    drafter = model.drafter
    assert drafter is not None
    out = drafter.draft(tokens, hidden, caches, window)
    last = mx.take_along_axis(out, accepted[:, None, None], axis=1)
    drawn: list[mx.array] = []
    weights: list[mx.array] = []
    for place in range(depth):
        expected = distribution(
            drafter.logits(last), None if counts is None else counts[:, None], params, plan
        )
        positions = cursors[:, None] + (1 + place)
        token = expected.pick(_noise(_draft_keys(params, plan), positions, expected, plan))
        drawn.append(token)
        if plan.ratio and expected.weights is not None:
            weights.append(expected.weights)
        if place + 1 < depth:
            if counts is not None:
                counts = counts.at[mx.arange(counts.shape[0]), token[:, 0]].add(1)
            at = cursors + place if drafter.advances else window.cursors + accepted
            here = Window.at(at, window.body_lengths, 1, window.table, window.entries)
            last = drafter.draft(token, last, caches, here)
    made = {"drafts": drawn} | ({"weights": weights} if weights else {})
    return {name: mx.concatenate(parts, axis=1) for name, parts in made.items()}


def _noise(keys: mx.array, positions: mx.array, of: Distribution, plan: Plan) -> mx.array | None:
    return noise(keys, positions, of.logits.shape[-1]) if plan.noise else None


def _draft_keys(params: Params, plan: Plan) -> mx.array:
    """Coupled rows draft with the target's noise, the others with noise of their own."""
    keys = params["keys"]
    return mx.where(params["ratio"], _stream(keys, _DRAFT_STREAM), keys) if plan.ratio else keys


def _stream(keys: mx.array, stream: int) -> mx.array:
    """Row keys ``[S, 2]`` of an independent stream of noise."""
    return keys ^ mx.array([stream, 0], mx.uint32)
