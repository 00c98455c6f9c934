"""Measure the ragged batch: tokens per second and acceptance by rows, depth and temperature.

    python -m scripts.bench.engine                      the demo model, everything
    python -m scripts.bench.engine --rows 1 8 --depths 0 3 --model PATH

All depths of one line are measured in turns, several laps of each, and the ratio is the median
over the laps of a depth's tokens per second to those of depth 0 in the same lap, so that what
else the machine is doing falls on all alike. On Linux, preload OpenBLAS for float32 products
that gain from more rows, as a GPU's do: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.loader import DEMO, load, resolve
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch

Prompt = tuple[list[int], list[list[mx.array]]]


@dataclass
class Measured:
    """One setting, summed over laps; ``laps`` are tokens per second."""

    rows: int
    depth: int
    temperature: float
    rule: str
    laps: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    row_steps: int = 0
    accepted: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.laps)

    @property
    def acceptance(self) -> list[float]:
        """Accepted at each position, of the drafts whose predecessors were all accepted."""
        judged = [self.row_steps, *self.accepted]
        return [
            accepted / before if before else 0.0
            for before, accepted in zip(judged, self.accepted[: self.depth], strict=False)
        ]


def read_prompts(model: RaggedModel, tokenizer: object, count: int, longest: int) -> list[Prompt]:
    """Prefill held-out prompts once; every setting starts from copies of them."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = []
    for index in range(count):
        tokens = tokenizer.encode(texts[index % len(texts)])[:longest]  # type: ignore[attr-defined]
        caches = model.new_prompt_cache()
        model.prefill(mx.array(tokens[:-1])[None], mx.array(tokens[1:])[None], caches)
        arrays = model.prompt_arrays(caches)
        mx.eval(arrays)
        prompts.append((tokens, arrays))
    return prompts


def lap(
    model: RaggedModel, prompts: Sequence[Prompt], measured: Measured, warm: int, tokens: int
) -> None:
    """Decode about ``tokens`` tokens a row and add what was seen to a setting's sums."""
    batch = Batch(model, measured.depth)
    for index, (prompt, arrays) in enumerate(prompts):
        sampling = Sampling(measured.temperature, seed=index, ratio=measured.rule == "ratio")
        batch.join(Row(str(index), prompt, 1 << 20, sampling), arrays)
    for _ in range(warm):
        batch.step()
    produced = 0
    began = time.perf_counter()
    while produced < tokens * len(prompts):
        for step in batch.step():
            produced += len(step.tokens)
            measured.row_steps += 1
            measured.drafted += step.drafted
            for position in range(step.accepted):
                measured.accepted[position] += 1
        measured.steps += 1
    seconds = time.perf_counter() - began
    measured.laps.append(produced / seconds)
    measured.seconds += seconds
    measured.tokens += produced


def show(console: Console, line: Sequence[Measured], table: Table) -> None:
    plain = line[0]
    for measured in line:
        ratios = [lap / base for lap, base in zip(measured.laps, plain.laps, strict=True)]
        table.add_row(
            f"{measured.temperature:g}",
            measured.rule,
            str(measured.rows),
            str(measured.depth),
            f"{measured.tokens_per_second:.0f}",
            f"{1000 * measured.seconds / measured.steps:.2f}",
            " ".join(f"{share:.2f}" for share in measured.acceptance),
            f"{measured.tokens / measured.row_steps:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        )
    table.add_section()
    console.print(f"rows {plain.rows}, temperature {plain.temperature:g}: done", style="dim")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--rules", nargs="+", default=["coupled", "ratio"])
    parser.add_argument("--tokens", type=int, default=64, help="a row and lap")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, at most")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    network, tokenizer, _ = load(resolve(args.model))
    model = as_ragged(network)
    if model is None or not model.drafts:
        sys.exit(f"--model {args.model}: it has no MTP head; this measures drafts")
    console = Console(stderr=True)
    prompts = read_prompts(model, tokenizer, max(args.rows), args.prompt_tokens)
    table = Table(title=f"{args.model} on {mx.default_device()}, MLX {mx.__version__}")
    for name in ("T", "rule", "rows", "depth", "tok/s", "ms/step", "accepted", "tok/step"):
        table.add_column(name, justify="right")
    table.add_column("x depth 0 (range)", justify="right")
    figures = []
    for temperature in args.temperatures:
        for rule in args.rules if temperature else ["coupled"]:
            for rows in args.rows:
                line = [Measured(rows, depth, temperature, rule) for depth in args.depths]
                for measured in line:
                    lap(model, prompts[:rows], Measured(**asdict(measured)), 2, 2)
                for _ in range(args.laps):
                    for measured in line:
                        lap(model, prompts[:rows], measured, 3, args.tokens)
                show(console, line, table)
                figures += [asdict(measured) for measured in line]
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
