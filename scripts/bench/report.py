"""Turn results of `against_mlx_lm.py` into one Markdown page with plots.

    python -m scripts.bench.report docs/benchmarks/results/*.json --out docs/benchmarks

The page is README.md in that directory; ``notes.md`` beside it, if there is one, comes first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BASE = "BatchGenerator"
THEIRS = (BASE, "stream_generate")
HEAD = """# Benchmarks

This engine beside mlx-lm: the same process, weights and prompts, in turns.

How to read the tables. K is the number of drafts a step verifies for each row; `auto` chooses it.
Figures are medians over laps, ranges in brackets, and a ratio is taken within each lap. Every lap
starts with new rows, whose first tokens do not count. Peak memory is what decoding adds to the
weights and to what the benchmark itself holds, also as a multiple of what the rows' caches come
to, each held once. *Accepted* is the share of drafts kept at each place, of those whose
predecessors were. What is said of `auto` is its speed over that of the best depth, lap by lap, and
then what the depths that it chose would make if each step took as long and brought as much as with
that depth all along: what is lost by choosing, without the luck of laps."""
COLUMNS = (
    *("", "tokens/s", "x BatchGenerator", "ms/step", "tokens/step", "accepted", "peak MB"),
    "x own cache",
)

Result = dict[str, Any]


def on_gpu(result: Result) -> bool:
    return "processor" not in result["device"]


def machine(result: Result) -> str:
    """The machine in a phrase."""
    if on_gpu(result):
        return f"one {result['device']}"
    return f"{result['cores']} cores of an {result['device']}"


def page(results: Sequence[Result], notes: str, out: Path) -> str:
    parts = [HEAD, notes.strip()]
    for title, gpu in (("GPU", True), ("CPU", False)):
        chosen = [result for result in results if on_gpu(result) == gpu]
        chosen.sort(key=lambda result: -len(result["decoding"]))
        if chosen:
            parts.append(f"## {title}")
        for number, result in enumerate(chosen):
            parts += section(result, out, f"{title.lower()}-{number}")
    return "\n\n".join(part for part in parts if part) + "\n"


def section(result: Result, out: Path, name: str) -> Iterator[str]:
    """One file of results: what ran where, its plot and its tables."""
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    yield f"### {result['model']}, {result['dtype']}, on {machine(result)}"
    yield f"{result['system']}, {versions}; weights {result['weights'] / 1e9:.2f} GB."
    yield f"```\n{result['command']}\n```"
    if len({measured["rows"] for measured in result["decoding"]}) > 2:
        plot(result, out / f"{name}.svg")
        yield f"![Tokens per second over those of BatchGenerator, by rows]({name}.svg)"
    for setting, line in settings(result["decoding"]):
        yield f"**{setting}**"
        yield table(COLUMNS, [cells(measured) for measured in line])
        yield from against_the_best(line)
    if result["reading"]:
        yield "**Prompts**"
        yield table(
            ("", "prompts", "first row's first token", "every row's", "prompt tokens/s"),
            [reading(measured) for measured in result["reading"]],
        )


def settings(decoding: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Each setting in words, with what was measured at it."""
    lines: dict[tuple[Any, ...], list[Result]] = {}
    for measured in decoding:
        key = tuple(measured[part] for part in ("rows", "context", "temperature", "rule"))
        lines.setdefault(key, []).append(measured)
    for key, line in sorted(lines.items(), key=lambda item: (*item[0][1:], item[0][0])):
        rows, context, temperature, rule = key
        words = f"{rows} row{'s' * (rows > 1)}, context {context}, temperature {temperature:g}"
        yield words + (f", rule {rule}" if temperature else ""), line


def against_the_best(line: Sequence[Result]) -> Iterator[str]:
    """How `auto` compares with whichever depth turned out to be the best."""
    fixed = [m for m in line if m["side"].startswith("K=") and m["laps"]]
    auto = next((m for m in line if m["side"] == "auto" and m["laps"]), None)
    if not fixed or auto is None:
        return
    best = max(fixed, key=lambda m: statistics.median(m["laps"]))
    shares = [a / b for a, b in zip(auto["laps"], best["laps"], strict=False)]
    steps = ", ".join(f"{n} at {depth}" for depth, n in sorted(auto["depths"].items()))
    said = f"`auto` over {best['side']}: {spread(shares, '.2f')}. Its steps by depth: {steps}."
    choice = share_of_choice(auto, fixed)
    yield said if choice is None else f"{said} At the figures above these would make {choice:.2f}."


def share_of_choice(auto: Result, fixed: Sequence[Result]) -> float | None:
    """What `auto`'s depths make of the best one's speed, each step at the figures of its own side.

    None where a depth that it chose was no side.
    """
    sides = {measured["side"].removeprefix("K="): measured for measured in fixed}
    if not auto["depths"] or auto["depths"].keys() - sides.keys():
        return None

    def each(part: str) -> float:
        counts: dict[str, int] = auto["depths"]
        return sum(n * sides[depth][part] / sides[depth]["steps"] for depth, n in counts.items())

    best = max(measured["tokens"] / measured["seconds"] for measured in fixed)
    return each("tokens") / each("seconds") / best


def cells(measured: Result) -> list[str]:
    """A side's row of a table."""
    if not measured["laps"]:
        return [measured["side"], f"failed: {measured['failed']}", *[""] * (len(COLUMNS) - 2)]
    accepted = [share for share in measured["accepted"] if share]
    per_step = measured["tokens"] / measured["steps"] / measured["rows"]
    return [
        measured["side"],
        spread(measured["laps"], ".0f"),
        spread(measured["ratios"], ".2f"),
        f"{1000 * measured['seconds'] / measured['steps']:.2f}",
        f"{per_step:.2f}",
        " ".join(f"{share:.2f}" for share in accepted),
        f"{measured['peak'] / 1e6:.0f}",
        f"{measured['peak'] / measured['own']:.2f}",
    ]


def reading(measured: Result) -> list[str]:
    rate = measured["rows"] * measured["length"] / statistics.median(measured["last"])
    return [
        measured["side"],
        f"{measured['rows']} of {measured['length']}",
        *(f"{1000 * statistics.median(measured[part]):.0f} ms" for part in ("first", "last")),
        f"{rate:.0f}",
    ]


def spread(values: Sequence[float], form: str) -> str:
    """A median and its range; nothing where nothing was measured."""
    if not values:
        return ""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({low:{form}}-{high:{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(result: Result, path: Path) -> None:
    """Ratios to `BatchGenerator` by rows, at the first context and temperature measured."""
    first = result["decoding"][0]
    chosen = [
        measured
        for measured in result["decoding"]
        if all(measured[part] == first[part] for part in ("context", "temperature", "rule"))
        and measured["side"] not in THEIRS
        and measured["ratios"]
    ]
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for side in dict.fromkeys(measured["side"] for measured in chosen):
        own = sorted((m for m in chosen if m["side"] == side), key=lambda m: m["rows"])
        middles = [statistics.median(m["ratios"]) for m in own]
        ranges = [
            [middle - min(m["ratios"]) for middle, m in zip(middles, own, strict=True)],
            [max(m["ratios"]) - middle for middle, m in zip(middles, own, strict=True)],
        ]
        rows = [str(m["rows"]) for m in own]
        axes.errorbar(rows, middles, yerr=ranges, marker="o", capsize=3, label=side)
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--", label=BASE)
    axes.set(xlabel="rows", ylabel=f"tokens/s, x {BASE}", ylim=(0, None))
    axes.set_title(f"{machine(result)}, context {first['context']}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "omlx-queue"
    notes = args.out / "notes.md"
    text = page(
        [json.loads(path.read_text()) for path in args.results],
        notes.read_text() if notes.exists() else "",
        args.out,
    )
    (args.out / "README.md").write_text(text)


if __name__ == "__main__":
    main()
