"""The tables of the page of benchmarks say what the files of results say."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import report

PAGE = report.FOLDER / "README.md"


def measured(side: str, laps: list[float], **more: Any) -> dict[str, Any]:
    """A side's figures as `against_mlx_lm` writes them."""
    known = {"side": side, "rows": 8, "laps": laps, "ratios": laps, "failed": ""}
    return {**known, "peak": 3_000_000, "own": 2_000_000, **more}


def line(*sides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {side["side"]: side for side in sides}


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert report.updated(page) == page, "run python -m scripts.bench.report"
    assert {name for _, name in report.PLACE.findall(page)} == set(report.TABLES)


def test_a_changed_figure_is_put_back() -> None:
    page = PAGE.read_text()
    ratio = statistics.median(report.GREEDY_256[8]["K=3"]["ratios"])
    changed = page.replace(f"| {ratio:.2f} (", "| 99.99 (")
    assert changed != page
    assert report.updated(changed) == page


def test_every_plot_of_the_page_is_there_and_no_other() -> None:
    plots = {f"{name}.svg" for name in report.PLOTS}
    assert {path.name for path in report.FOLDER.glob("*.svg")} == plots
    assert all(f"]({name})" in PAGE.read_text() for name in plots)


def test_ratios_are_medians_with_their_range_and_a_failed_side_is_empty() -> None:
    base = measured("BatchGenerator", [10.0, 30.0, 20.0])
    failed = measured("K=1", [], ratios=[], failed="RuntimeError: no memory")
    table = report.ratios({8: line(base, measured("K=0", [2.0, 1.0, 4.0]), failed)})
    assert table.splitlines()[-1] == "| 8 | 20 | 2.00 (1.00-4.00) |  |"


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sides = {rows: line(measured("K=0", [1.0, 2.0])) for rows in (1, 8)}
    report.plot("title", sides, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
