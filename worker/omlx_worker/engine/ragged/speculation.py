"""Drafts and their verdict: which drafts a row keeps, and which token follows them.

Both rules emit exactly what sampling token by token from the target would, in law:

``coupled``  The draft and the target sample with the same noise, and a draft is accepted when
             it is the target's own sample. What is emitted is always the target's sample, so a
             seed gives the same text at every depth, 0 included.
``ratio``    A draft ``d`` from the law ``q`` is accepted with probability ``min(1, p(d)/q(d))``,
             ``p`` being the target's; a rejection samples from ``max(p - q, 0)``, normalised
             (Leviathan et al. 2023, Chen et al. 2023). Accepts more often than ``coupled``.

At temperature 0 both laws put everything on one token, and the rules are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import Window
from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.sampling import Knobs, Law, Plan, law, noise, uniform

_DRAFT_STREAM = 0x9E3779B9
_VERDICT_STREAM = 0x7F4A7C15


@dataclass(frozen=True)
class Drafts:
    """Drafts waiting to be judged by the next step.

    Attributes:
        tokens: ``[S, K]`` int32.
        weights: ``[S, K, V]``, the log-weights they were drawn by; kept for ``ratio`` alone.
    """

    tokens: mx.array
    weights: mx.array | None = None


def judge(
    target: Law,
    drafts: Drafts | None,
    offered: mx.array,
    positions: mx.array,
    knobs: Knobs,
    plan: Plan,
) -> tuple[mx.array, mx.array]:
    """Accept drafts and sample the token after them.

    Args:
        target: the target's law at each window position.
        offered: ``[S]`` int32, how many of a row's drafts may be accepted.
        positions: ``[S, W]`` int32, the place in the history of each position's sample.

    Returns:
        Tokens ``[S, W]`` int32, of which a row's first ``accepted + 1`` are emitted, and the
        accepted counts ``[S]`` int32.
    """
    drawn = _noise(knobs["keys"], positions, target, plan)
    tokens = target.pick(drawn)
    if drafts is None:
        return tokens, mx.zeros_like(offered)
    depth = drafts.tokens.shape[1]
    places = mx.arange(depth)
    agrees = tokens[:, :depth] == drafts.tokens
    if plan.ratio:
        survives, instead = _judge_by_ratio(target, drafts, drawn, positions, knobs)
        agrees = mx.where(knobs["ratio"], survives, agrees)
    kept = agrees & (places < offered[:, None])
    accepted = mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1)
    if plan.ratio:
        rejected = (places == accepted[:, None]) & (places < offered[:, None])
        replaced = mx.where(rejected & knobs["ratio"], instead, tokens[:, :depth])
        replaced = mx.where(places < accepted[:, None], drafts.tokens, replaced)
        tokens = mx.concatenate([replaced, tokens[:, depth:]], axis=1)
    return tokens, accepted


def _judge_by_ratio(
    target: Law, drafts: Drafts, drawn: mx.array | None, positions: mx.array, knobs: Knobs
) -> tuple[mx.array, mx.array]:
    """Whether each draft survives ``[S, K]``, and the token to take if it does not."""
    assert target.weights is not None
    assert drafts.weights is not None
    assert drawn is not None
    depth = drafts.tokens.shape[1]
    p = mx.softmax(target.weights[:, :depth], axis=-1)
    q = mx.softmax(drafts.weights, axis=-1)
    chosen = drafts.tokens[..., None]
    p_chosen = mx.take_along_axis(p, chosen, axis=-1)[..., 0]
    q_chosen = mx.take_along_axis(q, chosen, axis=-1)[..., 0]
    u = uniform(_stream(knobs["keys"], _VERDICT_STREAM), positions[:, :depth])
    residual = mx.maximum(p - q, 0)
    # Where rounding leaves no residual, p equals q, and any sample of p is one of it.
    residual = mx.where(residual.max(axis=-1, keepdims=True) > 0, residual, p)
    instead = mx.argmax(mx.log(residual) + drawn[:, :depth], axis=-1).astype(mx.int32)
    return u * q_chosen < p_chosen, instead


def propose(
    model: RaggedModel,
    caches: Sequence[LayerCache],
    hidden: mx.array,
    counts: mx.array | None,
    depth: int,
    *,
    tokens: mx.array,
    accepted: mx.array,
    window: Window,
    cursors: mx.array,
    body_lengths: mx.array,
    knobs: Knobs,
    plan: Plan,
) -> Drafts:
    """Draft ``depth`` tokens for every row, after the window that was just judged.

    The head reads the whole window in one call; what it writes for positions that were not
    accepted, and for drafts deeper than one, lies at or past the new cursor, where the next
    window overwrites it.

    Args:
        hidden: ``[S, W, hidden]``, the backbone's normed output of the window.
        counts: ``[S, V]``, of each row's history with its new pending token.
        tokens, accepted: from `judge`.
        window: of the tokens that ``hidden`` belongs to.
        cursors: ``[S]`` int32, after the window was committed.
    """
    out = model.draft(tokens, hidden, caches, window)
    last = mx.take_along_axis(out, accepted[:, None, None], axis=1)
    drawn: list[mx.array] = []
    weights: list[mx.array] = []
    for place in range(depth):
        expected = law(model.logits(last), None if counts is None else counts[:, None], knobs, plan)
        positions = cursors[:, None] + (1 + place)
        token = expected.pick(_noise(_draft_keys(knobs, plan), positions, expected, plan))
        drawn.append(token)
        if plan.ratio and expected.weights is not None:
            weights.append(expected.weights)
        if place + 1 < depth:
            if counts is not None:
                counts = counts.at[mx.arange(counts.shape[0]), token[:, 0]].add(1)
            here = Window.at(cursors + place, body_lengths, 1, window.spans)
            last = model.draft(token, last, caches, here)
    return Drafts(
        mx.concatenate(drawn, axis=1), mx.concatenate(weights, axis=1) if weights else None
    )


def _noise(keys: mx.array, positions: mx.array, of: Law, plan: Plan) -> mx.array | None:
    return noise(keys, positions, of.logprobs.shape[-1]) if plan.noise else None


def _draft_keys(knobs: Knobs, plan: Plan) -> mx.array:
    """Coupled rows draft with the target's noise, the others with noise of their own."""
    keys = knobs["keys"]
    return mx.where(knobs["ratio"], _stream(keys, _DRAFT_STREAM), keys) if plan.ratio else keys


def _stream(keys: mx.array, stream: int) -> mx.array:
    """Row keys ``[S, 2]`` of an independent stream of noise."""
    return keys ^ mx.array([stream, 0], mx.uint32)
