"""How often does this engine's greedy text part from mlx-lm's, at each depth, and why?

    python -m scripts.bench.agreement --grow 4b

In exact arithmetic it never does. In bfloat16 two tokens may be so close that the order of a sum
decides. For every text that parts, this prints by how much mlx-lm's logits prefer its own token, in
steps of bfloat16 at that size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from scripts.bench.models import add_model_options, model_of

CHUNK = 512


def by_mlx_lm(network: nn.Module, prompt: Sequence[int], tokens: int) -> list[int]:
    """One row, a token at a time."""
    return [token for token, _ in generate_step(mx.array(prompt), network, max_tokens=tokens)]


def by_ragged(
    network: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, depth: int
) -> list[list[int]]:
    """All rows in one batch."""
    model = as_ragged(network, drafts=depth > 0)
    decoder = RaggedDecoder(model, depth)
    texts: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for (name, _), prompt in zip(texts.items(), prompts, strict=True):
        request = RowRequest(name, list(prompt), 1 << 20, Sampling(temperature=0.0))
        decoder.enter(Row(request))
    while min(len(text) for text in texts.values()) < tokens:
        for step in decoder.step():
            texts[step.row_id] += [sampled.token for sampled in step.tokens]
    return [text[:tokens] for text in texts.values()]


def parting(network: nn.Module, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Where two texts of a prompt part, and by how much mlx-lm preferred its own token."""
    place = next(i for i in range(len(theirs)) if ours[i] != theirs[i])
    logits = network(mx.array([prompt + theirs[:place]]))[0, -1].astype(mx.float32)
    lead = (logits[theirs[place]] - logits[ours[place]]).item()
    size = 2.0 ** (math.floor(math.log2(abs(logits[theirs[place]].item()))) - 7)
    return f"at {place}: {lead:.4f} ({lead / size:.1f} steps)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="a prompt")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 3])
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    prompts = [tokenizer.encode(text)[-48:] for text in heldout_texts()[: args.prompts]]
    theirs = [by_mlx_lm(network, prompt, args.tokens) for prompt in prompts]
    texts: dict[int, Any] = {}
    for depth in args.depths:
        ours = texts[depth] = by_ragged(network, prompts, args.tokens, depth)
        pairs = list(zip(prompts, ours, theirs, strict=True))
        parted = [parting(network, *pair) for pair in pairs if pair[1] != pair[2]]
        print(f"{name}, K={depth}: {len(parted)} of {len(pairs)} part from mlx-lm's", flush=True)
        for line in parted:
            print("  ", line)
        for other in args.depths[: args.depths.index(depth)]:
            same = sum(a == b for a, b in zip(ours, texts[other], strict=True))
            print(f"   {same} of {len(pairs)} texts are those of K={other}")


if __name__ == "__main__":
    main()
