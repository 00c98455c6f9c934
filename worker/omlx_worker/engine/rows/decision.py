"""Decisions: how likely a model is to answer with each of some texts. Nothing is sampled.

A choice counts with the probability of its tokens after the prompt. Where one choice begins with
the text of another, every choice counts with the end of the answer after it, too: the shorter one
would otherwise have all of the longer one's probability. What the choices have of all probability
is shared out among them.

Tokens with which choices begin alike are read once. A row reads one way through the choices, and
scores after each token all that choices have next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from omlx_worker.engine.rows.request import Target
from omlx_worker.engine.rows.tokens import in_common


def branches(
    spelled: Mapping[str, Sequence[int]], ends: Sequence[int], start: int
) -> list[tuple[list[int], tuple[Target, ...]]]:
    """The tokens that each row of a decision reads after its prompt, and what it scores.

    Args:
        spelled: the tokens of each choice.
        ends: tokens of which each ends an answer.
        start: tokens of the prompt.
    """
    ended = any(one != text and one.startswith(text) for one in spelled for text in spelled)
    choices = [list(tokens) for tokens in spelled.values()]
    # The last token of a choice is read only if its end is scored.
    ways = sorted(tokens if ended else tokens[:-1] for tokens in choices)
    longest = [
        way
        for way, after in zip(ways, [*ways[1:], None], strict=True)
        if after is None or after[: len(way)] != way
    ]
    made = []
    before: list[int] | None = None
    for way in longest:
        # Where the way before has been, it has scored what comes next.
        fresh = 0 if before is None else in_common(way, before) + 1
        found: dict[tuple[int, int], list[int]] = {}
        for number, tokens in enumerate(choices):
            common = in_common(way, tokens)
            for place in range(fresh, min(common + 1, len(tokens))):
                found.setdefault((place, tokens[place]), []).append(number)
            if ended and fresh <= len(tokens) == common:
                for end in ends:
                    found.setdefault((common, end), []).append(number)
        made.append(
            (
                way,
                tuple(
                    Target(start + place, token, tuple(numbers))
                    for (place, token), numbers in sorted(found.items())
                ),
            )
        )
        before = way
    return made


def probabilities(
    choices: Sequence[str], scored: Iterable[tuple[Sequence[Target], Sequence[float]]]
) -> dict[str, float]:
    """The probability of each choice among all.

    Args:
        scored: the targets of each row of `branches`, and their log-probabilities.
    """
    # Ends of an answer after one text are alternatives. Nothing else of a choice has one place.
    places: list[dict[int, list[float]]] = [{} for _ in choices]
    for targets, logprobs in scored:
        for target, logprob in zip(targets, logprobs, strict=True):
            for number in target.choices:
                places[number].setdefault(target.place, []).append(logprob)
    sums = [sum(map(_log_sum, each.values())) for each in places]
    total = _log_sum(sums)
    return {text: math.exp(each - total) for text, each in zip(choices, sums, strict=True)}


def _log_sum(values: Iterable[float]) -> float:
    """The logarithm of the sum of exponentials."""
    known = list(values)
    most = max(known)
    return most + math.log(sum(math.exp(value - most) for value in known))
