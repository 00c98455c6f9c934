"""How often a model's MTP head would have drafted the model's own greedy text right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.decoding import enter


@dataclass(frozen=True)
class Measured:
    """Drafts judged, and how many of them equal the model's own next token."""

    drafts: int
    accepted: int

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafts if self.drafts else 0.0


def first_draft_acceptance(
    network: nn.Module, prompts: Sequence[Sequence[int]], tokens: int
) -> Measured:
    """Generate greedily, then judge the head's first draft at every generated position.

    The head is primed over the whole prompt and run over the finished sequence in one pass,
    which equals drafting step by step, since every judged position is an accepted one.

    Args:
        network: a model with an ``mtp`` head.
        prompts: token ids, each judged on its own.
        tokens: how many to generate for each, end of text ignored.
    """
    model = as_ragged(network, checks=False)
    backbone = network.language_model.model
    drafts = accepted = 0
    for prompt, generated in zip(prompts, _greedy(model, prompts, tokens), strict=True):
        sequence = mx.array([*prompt, *generated])[None]
        hidden, embedded = backbone(sequence), backbone.embed_tokens(sequence[:, 1:])
        drafted = network.mtp(embedded, hidden[:, :-1], [None] * len(network.mtp.layers))
        guesses = mx.argmax(model.logits(drafted)[0], axis=-1)
        # Position p drafts token p + 2; the first draft follows the first generated token.
        first = len(prompt) - 1
        hits = guesses[first:-1] == sequence[0, first + 2 :]
        drafts += hits.size
        accepted += int(hits.sum())
    return Measured(drafts, accepted)


def _greedy(model: RaggedModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    decoder = RaggedDecoder(model)
    for index, prompt in enumerate(prompts):
        enter(decoder, RowRequest(str(index), list(prompt), tokens, Sampling(temperature=0.0)))
    generated: list[list[int]] = [[] for _ in prompts]
    while any(len(part) < tokens for part in generated):
        for step in decoder.step():
            generated[int(step.row_id)] += [sampled.token for sampled in step.tokens]
    return generated
