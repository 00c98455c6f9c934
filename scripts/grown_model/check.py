"""Compare a grown model with the demo model: tokens, and what becomes of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.row import Row, Sampling

DEPTH = 3


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts, greedy.

    Attributes:
        same: tokens before the first difference, of ``tokens``, over all prompts.
        differing: prompts whose texts part.
        nearest: the largest lead, in logits of the demo model, of its token over the grown
            model's where texts part; 0 where none do.
        accepted: drafts accepted of those judged, demo model and grown.
    """

    tokens: int
    same: int
    differing: int
    nearest: float
    accepted: tuple[float, float]

    def __str__(self) -> str:
        ours, theirs = self.accepted
        return (
            f"{self.same} of {self.tokens} tokens the same; {self.differing} texts part, where the "
            f"demo model's two choices are at most {self.nearest:.4f} apart; drafts accepted: "
            f"demo {ours:.3f}, grown {theirs:.3f}"
        )


def compare(
    demo: nn.Module, grown: nn.Module, tokenizer: Any, prompts: int, tokens: int
) -> Comparison:
    """Decode held-out prompts with both, ``tokens`` tokens each, drafting."""
    read = [tokenizer.encode(text)[-48:] for text in heldout_texts()[:prompts]]
    ours, our_share = _decoded(demo, read, tokens)
    theirs, their_share = _decoded(grown, read, tokens)
    same = differing = 0
    nearest = 0.0
    for prompt, mine, other in zip(read, ours, theirs, strict=True):
        agreed = next((i for i in range(tokens) if mine[i] != other[i]), tokens)
        same += agreed
        if agreed < tokens:
            differing += 1
            scores = demo(mx.array([prompt + mine[:agreed]]))[0, -1].astype(mx.float32)
            nearest = max(nearest, (scores[mine[agreed]] - scores[other[agreed]]).item())
    return Comparison(tokens * prompts, same, differing, nearest, (our_share, their_share))


def _decoded(
    network: nn.Module, prompts: list[list[int]], tokens: int
) -> tuple[list[list[int]], float]:
    """Tokens of every prompt, and the share of drafts that was accepted."""
    model = as_ragged(network)
    texts: list[list[int]] = []
    drafted = accepted = 0
    for prompt in prompts:
        decoder = RaggedDecoder(model, DEPTH)
        decoder.add(Row("row", prompt, tokens, Sampling(temperature=0.0)))
        while decoder.prefill({"row": 512})["row"]:
            pass
        text: list[int] = []
        while len(text) < tokens:
            for step in decoder.step():
                text += [sampled.token for sampled in step.tokens]
                drafted += step.drafted
                accepted += step.accepted
        texts.append(text[:tokens])
        decoder.remove("row")
    return texts, accepted / max(drafted, 1)
