"""The tables and plots of docs/benchmarks/README.md, made from docs/benchmarks/results.

    python -m scripts.bench.report            rewrite the page's tables and plots in place
    python -m scripts.bench.report --print    print the tables only

Each of these tables follows a line ``<!-- table: NAME -->`` of the page. The files of results are
written by `scripts.bench.against_mlx_lm`. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
DEPTHS = ("K=0", "K=1", "K=2", "K=3")
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(?:\|.*\n)*")

Measured = dict[str, Any]
Lines = dict[int, dict[str, Measured]]
"""Figures by rows and side."""


@cache
def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    return loaded


def lines(name: str, context: int, temperature: float = 0.0) -> Lines:
    """One setting of a file."""
    found: Lines = {}
    for m in results(name)["decoding"]:
        if (m["context"], m["temperature"]) == (context, temperature):
            found.setdefault(m["rows"], {})[m["side"]] = m
    return dict(sorted(found.items()))


def spread(values: Sequence[float]) -> str:
    """A median and its range; empty where nothing was measured."""
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def depths_in(measured: Lines) -> list[str]:
    """The depths that were measured with any number of rows."""
    return [side for side in DEPTHS if any(side in line for line in measured.values())]


def ratios(measured: Lines) -> str:
    """Tokens per second over those of `BatchGenerator`, by rows."""
    present = depths_in(measured)
    head = ["rows", "mlx-lm, tokens/s", *present]
    rows = []
    for count, line in measured.items():
        base = f"{statistics.median(line['BatchGenerator']['laps']):.0f}"
        cells = (spread(line[side]["ratios"]) if side in line else "" for side in present)
        rows.append([str(count), base, *cells])
    return markdown(head, rows)


def memory(measured: Lines) -> str:
    """Peak memory of decoding over the bytes of the rows' own caches."""
    sides = ("BatchGenerator", *depths_in(measured))
    rows = [
        [str(count), *(f"{line[side]['peak'] / line[side]['own']:.2f}" for side in sides)]
        for count, line in measured.items()
    ]
    return markdown(["rows", *sides], rows)


def prompts(names: Sequence[str]) -> str:
    """The wait for the first row's first token, and prompt tokens per second until every row's."""
    rows = []
    for name in names:
        loaded = results(name)
        pairs: dict[tuple[int, int], list[Measured]] = {}
        for m in loaded["reading"]:
            pairs.setdefault((m["rows"], m["length"]), []).append(m)
        for (count, length), sides in pairs.items():
            waits = (f"{1000 * statistics.median(m['first']):.0f}" for m in sides)
            speeds = (f"{count * length / statistics.median(m['last']):.0f}" for m in sides)
            where = f"{loaded['model']}, {loaded['device']}"
            rows.append([where, f"{count} of {length}", *waits, *speeds])
    waits = ("first token, ms: mlx-lm", "here")
    return markdown(["", "prompts", *waits, "prompt tokens/s: mlx-lm", "here"], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows)) + "\n"


GREEDY_256 = lines("h200-4b-256", 256)
GREEDY_8K = lines("h200-4b-8k", 8192)
SAMPLED = lines("h200-4b-sampling", 256, 1.0)
CPU = lines("cpu", 256)
TABLES: dict[str, Callable[[], str]] = {
    "greedy-256": partial(ratios, GREEDY_256),
    "greedy-8k": partial(ratios, GREEDY_8K),
    "sampled": partial(ratios, SAMPLED),
    "4-bit": partial(ratios, lines("h200-4b-4bit", 256)),
    "cpu": partial(ratios, CPU),
    "memory": partial(memory, GREEDY_8K),
    "prompts": partial(prompts, ["h200-4b-prompts", "cpu"]),
}
PLOTS = {
    "greedy-256": ("One NVIDIA H200, 4B cost, context 256, greedy", GREEDY_256),
    "greedy-8k": ("One NVIDIA H200, 4B cost, context 8,192, greedy", GREEDY_8K),
    "sampled-256": ("One NVIDIA H200, 4B cost, context 256, temperature 1", SAMPLED),
    "cpu": ("Two CPU cores, demo model, context 256, greedy", CPU),
}


def updated(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda found: found[1] + TABLES[found[2]](), page)


def plot(title: str, measured: Lines, path: Path) -> None:
    """Draw ratios to `BatchGenerator` by rows, with their ranges."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "omlx-queue"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for side in DEPTHS:
        own = {count: line[side]["ratios"] for count, line in measured.items() if side in line}
        middles = [statistics.median(values) for values in own.values()]
        ranges = [
            [middle - min(values) for middle, values in zip(middles, own.values(), strict=True)],
            [max(values) - middle for middle, values in zip(middles, own.values(), strict=True)],
        ]
        counts = [str(count) for count in own]
        axes.errorbar(counts, middles, yerr=ranges, marker="o", capsize=3, label=side)
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--", label="BatchGenerator")
    axes.set(xlabel="rows", ylabel="tokens/s, x BatchGenerator", ylim=(0, None))
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    args = parser.parse_args()
    if args.print:
        print("\n".join(f"{name}\n\n{table()}" for name, table in TABLES.items()))
        return
    page = FOLDER / "README.md"
    page.write_text(updated(page.read_text()))
    for name, (title, measured) in PLOTS.items():
        plot(title, measured, FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
