"""Loops in texts that the demo model samples: where they are, and a loss that unlearns them.

Text of a small model falls into repeating itself, greedy text most of all. There every draft is
accepted, so loops flatter the acceptance of greedy decoding beside that of sampling.
"""

import torch
from torch import Tensor

from scripts.demo_model.sampling import PREFIX, row_temperatures

WINDOW = 16
"""Tokens that have to come again, one after the other, before it counts as a loop."""


def in_loop(texts: Tensor) -> Tensor:
    """True at tokens that end WINDOW tokens which the model has written before.

    Texts [B, L], PREFIX tokens of each not the model's own; returns [B, L].
    """
    hashing = torch.Generator().manual_seed(0)
    factors = torch.randint(1 << 62, (WINDOW,), generator=hashing).to(texts.device)
    marked = torch.zeros_like(texts, dtype=torch.bool)
    for rows, found in zip(texts.split(256), marked.split(256), strict=True):
        hashes = (rows[:, PREFIX:].long().unfold(1, WINDOW, 1) * factors).sum(-1)
        earlier = (hashes[:, :, None] == hashes[:, None, :]).tril(-1)
        found[:, PREFIX + WINDOW - 1 :] = earlier.any(-1)
    return marked


def unlikelihood(log_probabilities: Tensor, tokens: Tensor, marked: Tensor) -> Tensor:
    """-log(1 - p) of the marked tokens (arXiv 1908.04319), summed, over the number of tokens.

    Args: log_probabilities [N, vocabulary], tokens [N], marked [N].
    """
    chosen = log_probabilities.gather(-1, tokens[:, None])[:, 0].clamp(max=-1e-5)
    return -(torch.log(-torch.expm1(chosen)) * marked).mean()


def looping_share(texts: Tensor, temperature: float) -> float:
    """Of the texts [B, L] of a temperature, those that end in a loop."""
    rows = row_temperatures(len(texts), texts.device) == temperature
    return round(in_loop(texts[rows])[:, -1].float().mean().item(), 4)


def distinct_trigrams(texts: Tensor, temperature: float) -> float:
    """Different trigrams a sampled token, mean over the texts [B, L] of a temperature."""
    rows = row_temperatures(len(texts), texts.device) == temperature
    samples = texts[rows][:, PREFIX:].tolist()
    different = [
        len({tuple(text[place : place + 3]) for place in range(len(text) - 2)}) / len(text)
        for text in samples
    ]
    return round(sum(different) / len(different), 4)
