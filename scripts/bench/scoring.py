"""How many prompts a second are scored here and by mlx-lm's own forward, and do the scores agree?

    python -m scripts.bench.scoring --dtype float32

The sides take turns, in processor time of this process. mlx-lm reads one prompt at a time, and then
batches of prompts of similar length, padded on the right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from scripts.bench.models import add_model_options, model_of

Scores = list[list[float]]
"""The log-probabilities of each prompt's tokens from the second on."""


def by_mlx_lm(network: nn.Module, prompts: Sequence[list[int]], together: int) -> Scores:
    """Some prompts, padded, in one forward."""
    scores: Scores = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), together):
        part = order[start : start + together]
        width = max(len(prompts[index]) for index in part)
        padded = [prompts[index] + [0] * (width - len(prompts[index])) for index in part]
        tokens = mx.array(padded)
        logits = network(tokens)[:, :-1].astype(mx.float32)
        own = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        told = (own - mx.logsumexp(logits, axis=-1)).tolist()
        for index, row in zip(part, told, strict=True):
            scores[index] = row[: len(prompts[index]) - 1]
    return scores


def by_ragged(decoder: RaggedDecoder, prompts: Sequence[list[int]], together: int) -> Scores:
    """A chunk of each of some prompts in one call."""
    scores: Scores = [[] for _ in prompts]
    for start in range(0, len(prompts), together):
        rows = []
        for index in range(start, min(start + together, len(prompts))):
            sampling = Sampling(temperature=0.0)
            request = RowRequest(str(index), prompts[index], 0, sampling, prompt_logprobs=0)
            rows.append(Row(request))
            decoder.add(rows[-1])
        while left := {row: 512 for row in rows if row.left}:
            for row, told in decoder.read(left).items():
                scores[int(row.row_id)] = [each.logprob or 0.0 for each in told]
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="of a prompt, at most")
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--laps", type=int, default=3)
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    prompts = [tokenizer.encode(text)[: args.length] for text in heldout_texts()[: args.prompts]]
    decoder = RaggedDecoder(as_ragged(network, drafts=False))
    sides: dict[str, Callable[[], Scores]] = {
        "here": lambda: by_ragged(decoder, prompts, args.together),
        "mlx-lm, one by one": lambda: by_mlx_lm(network, prompts, 1),
        "mlx-lm, padded": lambda: by_mlx_lm(network, prompts, args.together),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    scores: dict[str, Scores] = {}
    for lap in range(args.laps + 1):
        for side, run in sides.items():
            began = time.process_time()
            scores[side] = run()
            if lap:
                seconds[side].append(time.process_time() - began)
    tokens = sum(map(len, prompts))
    print(f"{name}: {len(prompts)} prompts of {tokens} tokens, up to {args.together} together")
    for side, laps in seconds.items():
        rate = len(prompts) / statistics.median(laps)
        told = f"{rate:.2f} prompts and {rate * tokens / len(prompts):.0f} tokens"
        print(f"{side:20} {told} a second of processor time")
    pairs = zip(scores["here"], scores["mlx-lm, one by one"], strict=True)
    furthest = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    print(f"the furthest two scores of a token are {furthest:.1e} apart")


if __name__ == "__main__":
    main()
