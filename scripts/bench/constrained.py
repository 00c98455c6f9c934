"""What do constrained rows cost their neighbours, and themselves?

    python -m scripts.bench.constrained --json results.json
    python -m scripts.bench.constrained --random 4b --dtype bfloat16 --contexts 256 32768

Two questions, each answered by sides in turns, lap by lap, at every depth asked for:

batch   the time of a step of ``--rows`` free rows and ``--beside`` more, which are free too or
        constrained. The ratio is of step times.
alone   the tokens per second of one row: free, constrained to text in JSON, and constrained to
        objects of long names and short values, which are mostly forced. The ratio is of these.

Ratios are taken within a lap, to the free side, and the median over laps is told. Greedy unless
``--temperature`` says otherwise. Schemas ask for arrays that no lap completes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.wire.structure import Constraint
from omlx_worker.bench.laps import LapPlan, Measured, in_turn, lap
from omlx_worker.bench.prompts import heldout_prompts
from omlx_worker.bench.report import machine
from omlx_worker.bench.sides import DecoderSide
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.rows.constraints import Grammar, Grammars
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.rows.row import Row
from scripts.bench.given_prompts import GivenDecoder, PromptCaches
from scripts.bench.models import add_model_options, model_of
from scripts.bench.synthetic_tokens import SyntheticGrammars

DISTINCT = 8
ENDLESS = 100_000
FREE, TEXT, FORCED = "free", "text", "forced"
SCHEMAS: dict[str, dict[str, Any]] = {
    TEXT: {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 40}, "body": {"type": "string"}},
    },
    FORCED: {
        "type": "object",
        "properties": {
            name: {"type": "boolean"}
            for name in (
                "is_registered_customer_of_the_store",
                "has_accepted_the_terms_of_service",
                "wants_to_receive_the_newsletter",
                "was_recommended_by_another_customer",
            )
        },
    },
}


class Constraining(GivenDecoder):
    """A decoder whose rows have a grammar from some row on."""

    def __init__(self, *given: Any, grammar: Grammar | None, first: int = 0) -> None:
        super().__init__(*given)
        self._grammar = grammar
        self._first = first

    def add(self, row: Row) -> int:
        if int(row.row_id) >= self._first:
            row.request = replace(row.request, grammar=self._grammar)
        return super().add(row)


def grammar_of(name: str, grammars: Grammars) -> Grammar | None:
    """The grammar of an endless array of objects; None for free text."""
    if name == FREE:
        return None
    item = SCHEMAS[name] | {
        "required": list(SCHEMAS[name]["properties"]),
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": ENDLESS}
    return grammars.compile(Constraint("json_schema", json.dumps(schema)))


@dataclass
class Timed(Measured):
    """A side with the time of its steps, lap by lap."""

    milliseconds: list[float] = field(default_factory=list)


def compare(
    sides: dict[str, DecoderSide], prompts: Sequence[list[int]], plan: LapPlan
) -> list[Timed]:
    """Run the sides in turns after one lap that warms them up."""
    line = {name: Timed(name, len(prompts), len(prompts[0])) for name in sides}
    for side in sides.values():
        lap(side, prompts, plan)
    for number in range(plan.laps):
        for name in in_turn(list(sides), number):
            steps, seconds, peak = lap(sides[name], prompts, plan)
            line[name].add(steps, seconds, peak)
            line[name].milliseconds.append(1e3 * seconds / len(steps))
    return list(line.values())


def figures_of(measured: Timed, base: Timed, question: str, depth: int) -> dict[str, Any]:
    """One line of the figures, its ratios to the free side."""
    return {
        "question": question,
        "depth": depth,
        "side": measured.side,
        "rows": measured.rows,
        "context": measured.context,
        "step_ms": statistics.median(measured.milliseconds),
        "x_step": _median_ratio(measured.milliseconds, base.milliseconds),
        "tokens_per_second": measured.tokens / measured.seconds,
        "x_tokens": _median_ratio(measured.laps, base.laps),
        "tokens_per_step": measured.tokens / measured.row_steps,
        "laps": measured.laps,
    }


def _median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def table_of(figures: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("question", "K", "side", "rows", "context"):
        table.add_column(name)
    for name in ("ms/step", "x step", "tok/s", "x tok/s", "tok/step"):
        table.add_column(name, justify="right")
    for each in figures:
        table.add_row(
            *(each["question"], str(each["depth"]), each["side"]),
            *(str(each["rows"]), str(each["context"])),
            *(f"{each['step_ms']:.2f}", f"{each['x_step']:.2f}"),
            *(f"{each['tokens_per_second']:.0f}", f"{each['x_tokens']:.2f}"),
            f"{each['tokens_per_step']:.2f}",
        )
    return table


class Benchmark:
    """All sides on one network."""

    def __init__(self, network: nn.Module, grammars: Grammars, args: argparse.Namespace) -> None:
        self._network = network
        self._caches = PromptCaches(network)
        self._grammars = {name: grammar_of(name, grammars) for name in (FREE, *SCHEMAS)}
        self._args = args

    def at(self, prompts: Sequence[list[int]]) -> Iterator[list[dict[str, Any]]]:
        """Answer both questions with prompts of one length, at every depth; lines as they come."""
        args = self._args
        self._caches.read(prompts)
        for depth, (question, rows, names) in itertools.product(
            args.depths,
            (("batch", args.rows + args.beside, (FREE, TEXT)), ("alone", 1, (FREE, TEXT, FORCED))),
        ):
            first = args.rows if question == "batch" else 0
            sides = {name: self._side(name, depth, first) for name in names}
            given = list(itertools.islice(itertools.cycle(prompts), rows))
            sampling = Sampling(args.temperature)
            plan = LapPlan(args.laps, args.tokens, args.settle, sampling=sampling)
            lines = compare(sides, given, plan)
            yield [figures_of(line, lines[0], question, depth) for line in lines]

    def _side(self, name: str, depth: int, first: int) -> DecoderSide:
        model = as_ragged(self._network, drafts=depth > 0, checks=False)
        decoder = Constraining(
            model, self._caches, depth, grammar=self._grammars[name], first=first
        )
        return DecoderSide(decoder, name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rows", type=int, default=32, help="free rows of a batch")
    parser.add_argument("--beside", type=int, default=8, help="rows beside them")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96, help="a row and lap")
    parser.add_argument("--laps", type=int, default=6)
    parser.add_argument("--settle", type=int, default=8, help="steps before a lap's clock starts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    vocabulary = as_ragged(network, drafts=False, checks=False).vocabulary
    own = vocabulary == len(tokenizer)
    grammars = Grammars(tokenizer, vocabulary) if own else SyntheticGrammars(vocabulary)
    head = {"what": "constrained", "model": name, "vocabulary": vocabulary, **machine()}
    head["command"] = shlex.join(["python", "-m", "scripts.bench.constrained", *sys.argv[1:]])
    benchmark, figures = Benchmark(network, grammars, args), list[dict[str, Any]]()
    for context in args.contexts:
        for lines in benchmark.at(heldout_prompts(tokenizer, context, DISTINCT)):
            figures += lines
            if args.json:
                args.json.write_text(json.dumps({**head, "decoding": figures}))
            Console(width=120).print(table_of(lines))
    # MLX aborts a process that ends while its device is at work.
    mx.synchronize()


if __name__ == "__main__":
    main()
