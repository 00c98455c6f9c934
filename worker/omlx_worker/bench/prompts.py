"""Prompts of benchmarks: Python that the demo model was not trained on."""

from __future__ import annotations

import itertools
import json
from typing import Any

from omlx_worker.engine.loading.checkpoint import DEMO, resolve


def heldout_texts() -> list[str]:
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def heldout_prompts(tokenizer: Any, context: int, count: int) -> list[list[int]]:
    """Prompts of ``context`` tokens, each from another place of the text, repeated where short."""
    texts = [tokenizer.encode(text + "\n\n\n") for text in heldout_texts()]
    prompts = []
    for index in range(count):
        start = index % len(texts)
        tokens = itertools.chain.from_iterable(itertools.cycle(texts[start:] + texts[:start]))
        prompts.append(list(itertools.islice(tokens, context)))
    return prompts
