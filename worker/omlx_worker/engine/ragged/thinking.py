"""Budgets of thinking, on the device: at its budget a row is made to end its thinking.

A row's thoughts are three numbers, ``on``, ``tokens`` and ``matched`` of
`omlx_worker.engine.rows.thinking.Thoughts`. They follow from the row's own tokens alone. So the
marker comes at one place in any company, at any depth and after any crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from omlx_worker.engine.rows.row import Row, Sampling
from omlx_worker.engine.rows.thinking import Thinking, Thoughts

_NO_MARKER = (-1,)
_UNLIMITED = 2**31 - 1


class Forced(NamedTuple):
    """Where rows have no choice.

    Attributes:
        here: ``[S, W]`` bool.
        tokens: ``[S, W]`` int32, what must come there.
    """

    here: mx.array
    tokens: mx.array


def thoughts_of(row: Row) -> mx.array:
    """The thoughts ``[1, 3]`` int32 of a row after the tokens that it starts with."""
    followed = Thoughts(row.sampling.thinking or Thinking(_NO_MARKER, _NO_MARKER))
    for token in row.generated:
        followed.feed(token)
    return mx.array([[followed.on, followed.tokens, followed.matched]], mx.int32)


def thinking_params(rows: Sequence[Sampling]) -> dict[str, mx.array]:
    """Budgets ``[S]``, and start and end markers ``[S, 2, L]`` with their lengths ``[S, 2]``."""
    budgets, markers = [], []
    for row in rows:
        thinking = row.thinking
        budget = thinking.budget if thinking else None
        budgets.append(_UNLIMITED if budget is None else budget)
        markers.append((thinking.start, thinking.end) if thinking else (_NO_MARKER, _NO_MARKER))
    longest = max(len(marker) for pair in markers for marker in pair)
    padded = [[[*marker, *_NO_MARKER * (longest - len(marker))] for marker in p] for p in markers]
    return {
        "budgets": mx.array(budgets, mx.int32),
        "markers": mx.array(padded, mx.int32),
        "marker_lengths": mx.array([[len(start), len(end)] for start, end in markers], mx.int32),
    }


def along(thoughts: mx.array, drafts: mx.array | None, params: Mapping[str, mx.array]) -> mx.array:
    """The thoughts before each sample of a window, ``[S, W, 3]``, if the drafts before it hold.

    Args:
        thoughts: ``[S, 3]``, after the pending token.
        drafts: ``[S, W - 1]``; None without any.
    """
    places = [thoughts]
    for place in range(0 if drafts is None else drafts.shape[1]):
        assert drafts is not None
        places.append(after(places[-1], drafts[:, place], params))
    return mx.stack(places, axis=1)


def after(thoughts: mx.array, tokens: mx.array, params: Mapping[str, mx.array]) -> mx.array:
    """The thoughts ``[S, 3]`` after one more token of each row, ``[S]``."""
    on, count, matched = (thoughts[:, index] for index in range(3))
    marker = mx.take_along_axis(params["markers"], on[:, None, None], axis=1)[:, 0]
    length = mx.take_along_axis(params["marker_lengths"], on[:, None], axis=1)[:, 0]
    expected = mx.take_along_axis(marker, matched[:, None], axis=1)[:, 0]
    begins = (tokens == marker[:, 0]).astype(mx.int32)
    matched = mx.where(tokens == expected, matched + 1, begins)
    whole = matched == length
    count = count + on - mx.where(whole, on * length, 0)
    return mx.stack([mx.where(whole, 1 - on, on), count, mx.where(whole, 0, matched)], axis=1)


def forced(thoughts: mx.array, params: Mapping[str, mx.array]) -> Forced:
    """What must come after thoughts ``[S, W, 3]``: the next token of the end marker."""
    on, count, matched = (thoughts[..., index] for index in range(3))
    here = (on > 0) & (count >= params["budgets"][:, None])
    return Forced(here, mx.take_along_axis(params["markers"][:, 1], matched, axis=1))
