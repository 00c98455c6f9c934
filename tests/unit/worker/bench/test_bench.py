"""`omlx-worker bench`: a small model measured beside mlx-lm, and what can go wrong with that."""

from __future__ import annotations

import getpass
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omlx_worker.bench import benchmark
from omlx_worker.bench.benchmark import BenchError, Benchmark
from omlx_worker.bench.laps import LapPlan, Measured, in_turn, lap, measure
from omlx_worker.bench.sides import AUTO, BatchGeneratorSide, DecoderSide, Step
from omlx_worker.cli import main
from omlx_worker.engine.loading.loader import decoder_of, load
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.checkpoints import write_llama, write_qwen

QUICK = ("--context", "8", "--tokens", "3", "--laps", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with a head."""
    return write_qwen(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("headless"))


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    yield
    logging.getLogger().setLevel(logging.WARNING)


def bench(model: Path | str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--model", str(model), *QUICK, *arguments])


def sides_of(report: dict[str, Any], rows: int) -> list[str]:
    return [figures["side"] for figures in report["decoding"] if figures["rows"] == rows]


@pytest.mark.slow
def test_every_depth_and_auto_are_measured_beside_mlx_lm(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = bench(tiny, "--rows", "1,2", "--json", str(report))
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    own = ["K=0", "K=1", "K=2", "K=3", "auto"]
    assert sides_of(told, 1) == ["BatchGenerator", "generate_step", *own]
    assert sides_of(told, 2) == ["BatchGenerator", *own]
    assert told["complete"]
    assert set(told["auto"]) == {"1", "2"}
    for figures in told["decoding"]:
        if figures["side"] == AUTO:
            depths = {int(depth): steps for depth, steps in figures["depths"].items()}
            assert depths[told["auto"][str(figures["rows"])]] == max(depths.values())
    assert told["weights"] > 0
    assert {"device", "buffers", "system", "cores", "versions", "command", "dtype"} <= set(told)


@pytest.mark.slow
def test_figures_add_up(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bench(tiny, "--rows", "2", "--depths", "0,2", "--laps", "2", "--json", str(report))
    for figures in json.loads(report.read_text())["decoding"]:
        assert len(figures["laps"]) == len(figures["ratios"]) == 2
        assert figures["tokens"] >= 2 * 2 * 3
        assert figures["row_steps"] == 2 * figures["steps"]
        assert figures["tokens"] == figures["row_steps"] + sum(figures["kept"].values())
        assert figures["peak"] > 0
        assert figures["failed"] == ""
        assert sum(figures["depths"].values()) == figures["steps"]


@pytest.mark.slow
def test_a_file_to_share_has_the_figures_and_names_nobody(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(side: BatchGeneratorSide, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        raise ValueError(f"cannot open {tmp_path}")

    monkeypatch.setattr(BatchGeneratorSide, "decode", fail)
    report = tmp_path / "report.json"
    result = bench(tiny, "--rows", "1", "--depths", "0,1", "--share", str(report))
    assert result.exit_code == 0, result.output
    text = report.read_text()
    told = json.loads(text)
    assert {"device", "memory", "buffers", "system", "cores", "model", "dtype", "weights"} <= set(
        told
    )
    assert set(told["versions"]) == {"python", "mlx", "mlx-lm", "omlx-queue"}
    assert sides_of(told, 1) == ["BatchGenerator", "generate_step", "K=0", "K=1"]
    assert told["decoding"][0]["failed"] == "ValueError"
    assert told["model"] == "a qwen3_5"
    assert isinstance(told["forms"], list)
    assert told["complete"]
    names = {getpass.getuser(), platform.node(), Path.home().name, tiny.name, str(tmp_path)}
    for name in names - {"root"}:
        assert name not in text
    assert "/" not in text.replace("tokens/s", "")


def test_a_model_of_the_hub_is_named_in_a_file_to_share(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "resolve", lambda _: tiny)
    report = tmp_path / "report.json"
    bench("org/name", "--rows", "1", "--depths", "0", "--share", str(report))
    assert json.loads(report.read_text())["model"] == "org/name"


@pytest.mark.slow
def test_the_table_fits_80_columns_and_progress_goes_to_stderr(tiny: Path) -> None:
    result = bench(tiny, "--rows", "1", "--depths", "0,1,auto")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    [head] = [line for line in lines if "tok/s" in line]
    assert " ".join(head.split()) == "rows tok/s x mlx-lm ms/step tok/step accepted MiB"
    for name in ("mlx-lm batch", "mlx-lm stream", "no drafts", "1 draft", "auto: "):
        assert any(name in line for line in lines), name
    assert "10 of 10 laps done" in result.stderr
    assert "laps done" not in result.stdout


def test_a_model_without_a_head_is_measured_without_drafts(headless: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert bench(headless, "--rows", "2", "--json", str(report)).exit_code == 0
    told = json.loads(report.read_text())
    assert sides_of(told, 2) == ["BatchGenerator", "K=0"]
    assert told["auto"] == {}


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_drafts_of_a_model_without_a_head_are_refused(headless: Path, depth: str) -> None:
    result = bench(headless, "--depths", f"0,{depth}")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"--depths: got {depth}, but nothing drafts for {headless} " in result.stderr


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    result = bench("/nowhere/at/all")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--model /nowhere/at/all: no such directory" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "0"], "got '0'; give 1 to 1024"),
        (["--rows", "1,many"], "got 'many'; give 1 to 1024"),
        (["--depths", "5"], "got '5'; give 0 to 4 or auto"),
        (["--laps", "0"], "--laps: got '0'; give a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr


def test_rows_beyond_the_models_context_are_refused_with_its_length(tiny: Path) -> None:
    result = bench(tiny, "--depths", "0", "--context", "1022")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    said = f"--context: got 1022 beside --tokens 3, but the context of {tiny} has 1024 tokens; "
    assert f"{said}give at most 1024 together" in result.stderr
    Benchmark(str(tiny), (1,), (0,), 1021, LapPlan(tokens=3))


def test_rows_that_do_not_fit_are_refused_with_how_many_would(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LapPlan()
    weights = Benchmark(str(tiny), (2, 64), (0,), 64, plan).weight_bytes
    monkeypatch.setattr(benchmark, "budget", lambda: weights + 8 * 2**20)
    with pytest.raises(
        BenchError, match=r"--rows: 64 rows of up to .* measure at most (\d+)$"
    ) as e:
        Benchmark(str(tiny), (2, 64), (0,), 64, plan)
    most = int(str(e.value).rpartition(" ")[2])
    assert 2 <= most < 64
    Benchmark(str(tiny), (most,), (0,), 64, plan)
    with pytest.raises(BenchError, match=f"--rows: {most + 1} rows"):
        Benchmark(str(tiny), (most + 1,), (0,), 64, plan)


def test_a_model_that_leaves_no_room_is_refused_too(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "budget", lambda: 1)
    with pytest.raises(BenchError, match="take a smaller model or --context"):
        Benchmark(str(tiny), (1,), None, 64, LapPlan())


def test_an_interrupt_prints_what_there_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, laps = DecoderSide.decode, []

    def interrupted(
        side: DecoderSide, prompts: Sequence[list[int]], sampling: Sampling
    ) -> Generator[Step]:
        laps.append(side.name)
        if laps.count("K=0") > 2:
            raise KeyboardInterrupt
        yield from decode(side, prompts, sampling)

    monkeypatch.setattr(DecoderSide, "decode", interrupted)
    report = tmp_path / "report.json"
    arguments = ("--rows", "2", "--depths", "0", "--laps", "3", "--json", str(report))
    result = bench(tiny, *arguments)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "no drafts" in result.stdout
    told = json.loads(report.read_text())
    assert not told["complete"]
    assert [len(figures["laps"]) for figures in told["decoding"]] == [1, 1]


def test_a_side_that_fails_says_why_and_the_others_go_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(side: BatchGeneratorSide, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        raise ValueError("this family\ncannot be batched")

    monkeypatch.setattr(BatchGeneratorSide, "decode", fail)
    report = tmp_path / "report.json"
    result = bench(tiny, "--rows", "2", "--depths", "0", "--json", str(report))
    assert result.exit_code == 0
    assert "2 rows, mlx-lm batch: ValueError: this family cannot be batched" in result.stdout
    theirs, own = json.loads(report.read_text())["decoding"]
    assert theirs["laps"] == own["ratios"] == []
    assert len(own["laps"]) == 1


class Counted:
    """A side of two rows of which one accepts its draft in every step and one in none."""

    name = "counted"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
        self.calls.append("start")
        try:
            while True:
                self.calls.append("step")
                yield [(1, 0), (1, 1)]
        finally:
            self.calls.append("stop")


def test_a_lap_counts_what_comes_after_it_has_settled_until_every_row_has_its_tokens() -> None:
    side, measured = Counted(), Measured("counted", 2, 1)
    measured.add(*lap(side, [[1], [2]], LapPlan(tokens=5, settle=2)))
    assert side.calls == ["start", *["step"] * 6, "stop"]
    assert (measured.steps, measured.tokens, measured.row_steps) == (4, 12, 8)
    assert measured.accepted == [0.5]
    assert measured.depth == 1


def test_a_side_that_fails_in_a_lap_keeps_the_figures_of_its_whole_laps() -> None:
    class Failing(Counted):
        def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
            steps = super().decode(prompts, sampling)
            for number, step in enumerate(steps):
                if number > 3 and self.calls.count("start") > 2:
                    raise RuntimeError("no memory")
                yield step

    plan = LapPlan(laps=3, tokens=5, settle=2)
    *_, ([measured], _) = measure([Failing()], [[1], [2]], plan)
    assert measured.failed == "RuntimeError: no memory"
    assert (len(measured.laps), measured.steps, measured.tokens) == (1, 4, 12)


def test_what_is_accepted_at_a_place_is_a_share_of_what_was_before_it() -> None:
    measured = Measured("K=3", 1, 1)
    measured.add([[(3, accepted)] for accepted in (0, 1, 3, 3)], 1.0, 0)
    assert measured.accepted == [3 / 4, 2 / 3, 2 / 2]


def test_steps_without_drafts_say_nothing_of_what_is_accepted() -> None:
    measured = Measured("auto", 1, 1)
    measured.add([[(1, 1)], [(0, 0)], [(2, 1)], [(0, 0)]], 1.0, 0)
    assert measured.accepted == [1.0, 0.0]
    assert measured.depths == {0: 2, 1: 1, 2: 1}


def test_a_side_removes_its_rows_at_the_end_of_a_lap(tiny: Path) -> None:
    network, _, _ = load(tiny)
    decoder = decoder_of(network, max_rows=2, depth=1)
    side = DecoderSide(decoder)
    for _ in range(2):
        steps = side.decode([[1, 2, 3], [4, 5, 6]], Sampling(temperature=0.0))
        assert len(next(steps)) == 2
        steps.close()
    assert decoder.step() == []


def test_the_worker_starts_without_the_benchmark_and_without_mlx() -> None:
    check = (
        "import sys, omlx_worker.cli; print([m for m in sys.modules if 'bench' in m or m == 'mlx'])"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, env=paths
    )
    assert told.stdout.strip() == "['omlx_worker.bench', 'omlx_worker.bench.cli']"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_side_gains_by_its_place_in_a_lap(count: int) -> None:
    laps = [in_turn(range(count), number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in laps)
    for place in range(count):
        assert sorted(order[place] for order in laps) == sorted([*range(count)] * 2)
    after = {pair for order in laps for pair in itertools.pairwise(order)}
    assert all((b, a) in after for a, b in after), "whoever follows a side also precedes it"
