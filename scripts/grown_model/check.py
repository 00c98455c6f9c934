"""Compare a grown model with the demo model: tokens, and what becomes of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row

DEPTH = 3


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts, greedy.

    Attributes:
        same: tokens before the first difference, of ``tokens``, over all prompts.
        differing: prompts whose texts part.
        nearest: the largest lead, in logits of the demo model, of its token over the grown
            model's where texts part; 0 where none do.
        accepted: of the steps that drafted so far, the share in which the draft at each place was
            accepted; demo model and grown.
    """

    tokens: int
    same: int
    differing: int
    nearest: float
    accepted: tuple[list[float], list[float]]

    def __str__(self) -> str:
        ours, theirs = (" ".join(f"{share:.2f}" for share in each) for each in self.accepted)
        return (
            f"{self.same} of {self.tokens} tokens the same; {self.differing} texts part, where the "
            f"demo model's two choices are at most {self.nearest:.4f} apart; drafts accepted at "
            f"places 1 to {DEPTH}: demo {ours}, grown {theirs}"
        )


def compare(
    demo: nn.Module, grown: nn.Module, tokenizer: Any, prompts: int, tokens: int
) -> Comparison:
    """Decode held-out prompts with both, ``tokens`` tokens each, drafting."""
    read = [tokenizer.encode(text)[-48:] for text in heldout_texts()[:prompts]]
    ours, our_shares = _decoded(demo, read, tokens)
    theirs, their_shares = _decoded(grown, read, tokens)
    same = differing = 0
    nearest = 0.0
    for prompt, mine, other in zip(read, ours, theirs, strict=True):
        agreed = next((i for i in range(tokens) if mine[i] != other[i]), tokens)
        same += agreed
        if agreed < tokens:
            differing += 1
            scores = demo(mx.array([prompt + mine[:agreed]]))[0, -1].astype(mx.float32)
            nearest = max(nearest, (scores[mine[agreed]] - scores[other[agreed]]).item())
    return Comparison(tokens * prompts, same, differing, nearest, (our_shares, their_shares))


def _decoded(
    network: nn.Module, prompts: list[list[int]], tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Tokens of every prompt, and the share of steps in which each place's draft was accepted."""
    model = as_ragged(network)
    texts: list[list[int]] = []
    drafted, accepted = ([0] * DEPTH for _ in range(2))
    for prompt in prompts:
        decoder = RaggedDecoder(model, DEPTH)
        row = Row(RowRequest("row", prompt, tokens, Sampling(temperature=0.0)))
        decoder.enter(row)
        text: list[int] = []
        while len(text) < tokens:
            for step in decoder.step():
                text += [sampled.token for sampled in step.tokens]
                for place in range(DEPTH):
                    drafted[place] += step.drafted > place
                    accepted[place] += step.accepted > place
        texts.append(text[:tokens])
        decoder.leave(row)
    return texts, [took / max(made, 1) for took, made in zip(accepted, drafted, strict=True)]
