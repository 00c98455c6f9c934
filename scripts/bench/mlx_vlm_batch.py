"""mlx-vlm's own batch, for `scripts.bench.pictures`: ``python -m ... CHECKPOINT < LAPS > FIGURES``.

It has a process of its own, because mlx-vlm patches transformers. A lap is a line of JSON with
``pictures``, ``prompt``, ``tokens`` and ``at_once``; its figures are a line, too. The first line
comes once the model is loaded.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import mlx.core as mx


def run(model: Any, processor: Any, lap: dict[str, Any]) -> dict[str, Any]:
    """Run a lap, `at_once` pictures a call; returns its figures."""
    from mlx_vlm import batch_generate

    pictures, at_once, tokens, reading = lap["pictures"], lap["at_once"], 0, 0.0
    mx.reset_peak_memory()
    began, computed = time.perf_counter(), time.process_time()
    for start in range(0, len(pictures), at_once):
        some = pictures[start : start + at_once]
        prompts = [lap["prompt"]] * len(some)
        made = batch_generate(
            model, processor, images=some, prompts=prompts, max_tokens=lap["tokens"]
        )
        tokens += made.stats.generation_tokens
        reading += made.stats.prompt_time
    seconds = time.perf_counter() - began
    figures = {"seconds": seconds, "tokens": tokens, "reading_seconds": reading}
    spent = {"mlx-vlm": time.process_time() - computed}
    return figures | {"cpu": spent, "peak": mx.get_peak_memory()}


def main() -> None:
    from mlx_vlm import load
    from mlx_vlm.version import __version__

    answers, sys.stdout = sys.stdout, sys.stderr
    model, processor = load(sys.argv[1])
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    # Every text has all of its tokens.
    processor.tokenizer.stopping_criteria.eos_token_ids = []
    print(json.dumps({"mlx-vlm": __version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, processor, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
