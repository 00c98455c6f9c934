"""What does `--prefix-dir` save after a restart, and how long does it hold the decode thread?

    python -m scripts.bench.restarts --lengths 2000 4000

For each length, without the folder and with it in turns: a worker's decoder adds a prompt twice,
so that it is kept on disk. The next start's decoder, which has been there for a moment, adds it
again. Times are the processor's, since others may use the machine: of the whole process until the
first token, and of the decode thread alone while a row is added.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from omlx_worker.engine.loading.checkpoint import resolve
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.prefixes import Prefixes
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.row import Row, Sampling
from scripts.bench.models import add_model_options, model_of

CHUNK = 512
ROOM = 4 << 30
MOMENT = 1.0
"""Seconds that a start has to read the folder; loading a real model's weights takes longer."""


def first_token(decoder: RaggedDecoder, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds of the process until a prompt's first token, and of this thread to add it."""
    began, adding = time.process_time(), time.thread_time()
    decoder.add(Row("row", prompt, 8, Sampling(temperature=0.0)))
    added = time.thread_time() - adding
    left = len(prompt)
    while left:
        keep = ["row"] if left <= CHUNK else []
        left = decoder.prefill({"row": CHUNK}, keep)["row"]
    while not any(emission.tokens for emission in decoder.step()):
        pass
    took = time.process_time() - began
    decoder.remove("row")
    return 1000 * took, 1000 * added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--laps", type=int, default=5)
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    model, paths = as_ragged(network), [resolve(args.model)]
    print(name)
    for length in args.lengths:
        prompt = [random.randrange(256, len(tokenizer)) for _ in range(length)]
        sides: dict[str, list[tuple[float, float, float]]] = {"without": [], "with": []}
        for _ in range(args.laps):
            for side, times in sides.items():
                with tempfile.TemporaryDirectory() as folder:
                    prefixes = Prefixes(ROOM, Path(folder) if side == "with" else None, ROOM)
                    make_prefixes = partial(prefixes.cache, model, paths=paths)
                    decoder = RaggedDecoder(model, make_prefixes=make_prefixes)
                    first_token(decoder, prompt)
                    _, again = first_token(decoder, prompt)
                    decoder.close()
                    decoder = RaggedDecoder(model, make_prefixes=make_prefixes)
                    time.sleep(MOMENT)
                    times.append((*first_token(decoder, prompt), again))
                    decoder.close()
        for side, times in sides.items():
            took, added, again = map(statistics.median, zip(*times, strict=True))
            print(
                f"{length} tokens, {side} the folder: first token after a restart {took:.0f} ms, "
                f"to add the row {added:.2f} ms; to add it a second time {again:.2f} ms"
            )


if __name__ == "__main__":
    main()
