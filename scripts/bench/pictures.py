"""How fast do pictures become texts by `omlx-submit run`, beside mlx-vlm's own batch?

    python -m scripts.bench.pictures                                  the demo model, 200 pictures
    python -m scripts.bench.pictures --size 4b --json pictures.json   its cost on a GPU
    python -m scripts.bench.pictures --size 4b --pictures 1000 --laps 1 --alone

The model is the demo model grown to a size, with a vision tower of random weights. One worker
serves it without drafts, on a Redis server of the script's own; mlx-vlm's `batch_generate` has it
in another process. A lap is a folder of drawn pages through one of them, other pages in every lap.
Half of the pages lie across. mlx-vlm gets them sorted by shape, as many a call as the worker has
rows. Sides take turns, and ratios are taken within a lap. Without mlx-vlm, or with ``--alone``, the
worker runs alone. Laps begin once its warm-up is over, with one that does not count.

Then rows without pictures stream their tokens, alone and beside a folder, which is less urgent.
Memory is the most in each tenth of a lap. Seconds of the CPU are those of worker, Redis and client.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.client.workers import read_workers
from omlx_producer.producer import Producer
from omlx_producer.wire import GenerationRequest
from omlx_worker.bench.laps import in_turn
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.bench.report import machine
from omlx_worker.processes import wait_until
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.pipeline.clients import WorkerSide as Streams
from scripts.bench.pipeline.lap import CpuClock
from scripts.bench.processes import (
    idle_figures,
    submit,
    wait_until_idle,
    wait_until_served,
    worker,
)
from scripts.bench.report import spread
from scripts.bench.watched_worker import Notes
from tests.helpers.pictured_demo import write_pictured_demo

ALIAS = "pictures"
WORKER, MLX_VLM = "worker", "mlx-vlm"
PROMPT = "Write down all text on the page."
DEMO = "demo"
PAGES = {DEMO: (192, 128), "tiny": (320, 256), "0.8b": (1024, 768), "4b": (1024, 768)}
"""Sizes of models, and the longer and the shorter side of a page in pixels."""

FONT_SIZE = 14
TENTHS = 10
COUNTS = ("pictures", "picture_seconds", "prompt_tokens", "steps", "prompt_windows", "traces")

Figures = dict[str, Any]


def draw_pages(folder: Path, lap: int, count: int, sides: tuple[int, int]) -> list[Path]:
    """Write pages of text as JPEG files; returns their paths, sorted by shape."""
    folder.mkdir()
    text, font = "\n\n\n".join(heldout_texts()), ImageFont.load_default(FONT_SIZE)
    upright, across = list[Path](), list[Path]()
    for number in range(count):
        size = sides if number % 2 else sides[::-1]
        page = Image.new("RGB", size, "white")
        start = (lap * count + number) * 97 % len(text)
        ImageDraw.Draw(page).text((8, 8), f"{lap}.{number} {text[start : start + 8000]}", 0, font)
        path = folder / f"{number:05}.jpg"
        page.save(path, quality=90)
        (across if number % 2 else upright).append(path)
    return upright + across


@dataclass
class WorkerSide:
    """The worker, and folders for it.

    Attributes:
        processes: ids of the worker and of Redis.
    """

    producer: Producer
    url: str
    processes: dict[str, int]
    notes: Notes
    tokens: int
    name: str = WORKER

    def submit(self, folder: Path) -> float:
        """Run a folder; returns the seconds that it took."""
        options = ["--template", PROMPT, "--temperature", 0, "--ignore-eos"]
        options += ["--max-completion-tokens", self.tokens]
        return submit(self.url, "run", folder, "-o", folder.with_suffix(".jsonl"), *options)

    def lap(self, pages: Sequence[Path]) -> Figures:
        folder = pages[0].parent
        before = idle_figures(self.producer, ALIAS, 0)
        cpu, clients, began = CpuClock(**self.processes), os.times(), time.time()
        seconds = self.submit(folder)
        ended, now = time.time(), os.times()
        client = now.children_user + now.children_system
        client -= clients.children_user + clients.children_system
        spent = {**cpu.stop(), "client": client}
        tokens = self._tokens_of(folder.with_suffix(".jsonl"), len(pages))
        after = idle_figures(self.producer, ALIAS, before.tokens + tokens)
        counts = {each: getattr(after, each) - getattr(before, each) for each in COUNTS}
        memory = self.notes.parts(began, ended, TENTHS)
        return {"seconds": seconds, "tokens": tokens, "cpu": spent, **counts, "memory": memory}

    def _tokens_of(self, results: Path, count: int) -> int:
        """The tokens of a complete file of results."""
        bodies = [json.loads(line)["response"]["body"] for line in results.open()]
        tokens = [body["usage"]["completion_tokens"] for body in bodies]
        if tokens != [self.tokens] * count:
            sys.exit(f"{results.name}: {len(tokens)} results of {count} pages, or too few tokens")
        return sum(tokens)


class MlxVlmSide:
    """mlx-vlm's batch in a process of its own."""

    name = MLX_VLM

    def __init__(self, process: subprocess.Popen[str], tokens: int, at_once: int) -> None:
        self._process, self._tokens, self._at_once = process, tokens, at_once
        self.version = self._read()

    def lap(self, pages: Sequence[Path]) -> Figures:
        assert self._process.stdin
        lap = {"pictures": [str(page) for page in pages], "prompt": PROMPT}
        lap |= {"tokens": self._tokens, "at_once": self._at_once}
        print(json.dumps(lap), file=self._process.stdin, flush=True)
        figures = self._read()
        if figures["tokens"] != self._tokens * len(pages):
            sys.exit(f"mlx-vlm generated {figures['tokens']} tokens for {len(pages)} pages")
        return figures

    def _read(self) -> Figures:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            figures: Figures = json.loads(line)
            return figures
        sys.exit("mlx-vlm has ended; see its messages above")


@contextmanager
def mlx_vlm(model: Path, args: argparse.Namespace) -> Iterator[MlxVlmSide]:
    command = [sys.executable, "-m", "scripts.bench.mlx_vlm_batch", str(model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield MlxVlmSide(process, args.tokens, args.at_once)


class Bench:
    """The sides, and the figures of all laps.

    Args:
        stack: ends the sides.
    """

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self._args = args
        self._drawn = 0
        self.versions = dict[str, str]()
        enter = stack.enter_context
        self._folder = folder = Path(enter(tempfile.TemporaryDirectory()))
        model = args.model or made(folder / "model", args.size)
        url = enter(EmbeddedRedis(folder / "redis")).url
        producer = enter(Producer(url))
        notes = Notes(folder / "notes")
        program = ("-m", "scripts.bench.watched_worker", str(notes.path))
        options = {"model": model, "mode": "batched", "max-batch": args.at_once}
        env = {"OMLX_QUEUE_STATE_DIR": str(folder / "state")}
        process = enter(worker(url, ALIAS, options, env, program))
        wait_until_served(producer, [ALIAS], [process])
        wait_until_idle(process)
        redis: int = producer.connection.info("server")["process_id"]
        processes = {"worker": process.pid, "redis": redis}
        self._worker = WorkerSide(producer, url, processes, notes, args.tokens)
        self._streams = Streams(producer, url, "high", **processes)
        self._sides: list[WorkerSide | MlxVlmSide] = [self._worker]
        if importlib.util.find_spec("mlx_vlm") is None:
            print("mlx-vlm is not installed: the worker runs alone", file=sys.stderr)
        elif not args.alone:
            theirs = enter(mlx_vlm(model, args))
            self.versions = theirs.version
            self._sides.append(theirs)

    def lap(self, number: int) -> dict[str, Figures]:
        """Both sides with the same pages. Sides take turns."""
        pages = self._pages()
        turns = {side.name: side.lap(pages) for side in in_turn(self._sides, number)}
        return {side.name: turns[side.name] for side in self._sides}

    def streams(self) -> dict[str, Figures]:
        """Gaps between the tokens of rows without pictures, alone and beside a folder."""
        alone = self._streams.lap(self._texts()).to_json()
        before = idle_figures(self._worker.producer, ALIAS, 0).pictures
        pages = self._pages()
        with ThreadPoolExecutor(1) as pool:
            folder = pool.submit(self._worker.submit, pages[0].parent)
            wait_until(lambda: folder.done() or self._looks() > before)
            beside = self._streams.lap(self._texts()).to_json()
            outlived = folder.done()
            folder.result()
        return {"alone": alone, "beside": {**beside, "outlived": outlived}}

    def _looks(self) -> int:
        return sum(each.pictures for each in read_workers(self._worker.producer.connection, ALIAS))

    def _pages(self) -> list[Path]:
        self._drawn += 1
        folder = self._folder / f"pages-{self._drawn}"
        return draw_pages(folder, self._drawn, self._args.pictures, self._args.page)

    def _texts(self) -> list[GenerationRequest]:
        self._drawn += 1
        text = "\n\n\n".join(heldout_texts())
        return [
            GenerationRequest(
                model=ALIAS,
                prompt=text[place * 500 + self._drawn :][:400],
                max_completion_tokens=self._args.beside_tokens,
                temperature=0.0,
                ignore_eos=True,
            )
            for place in range(self._args.beside)
        ]


def made(path: Path, size: str) -> Path:
    """Write a model that takes pictures."""
    if size == DEMO:
        return write_pictured_demo(path)
    grow = [sys.executable, "-m", "scripts.grown_model.grow", "--tower"]
    subprocess.run([*grow, "--size", size, "--out", str(path)], check=True)
    return path


def show(laps: Sequence[dict[str, Figures]], beside: Sequence[dict[str, Figures]]) -> None:
    """Tables of the sides, of the worker's memory, and of the rows without pictures."""
    console = Console(width=max(Console().width, 140))
    names = ("", "pictures/s", "tokens/s", f"x {MLX_VLM}", "CPU, s", "tower, s")
    table = _table(*names, "prompt tokens", "steps", "windows", "traces")
    for name in laps[0]:
        of = [lap[name] for lap in laps]
        pairs = zip(_speeds(laps, name), _speeds(laps, MLX_VLM), strict=False)
        table.add_row(
            name,
            spread(_speeds(laps, name)),
            spread([each["tokens"] / each["seconds"] for each in of]),
            spread([own / other for own, other in pairs]),
            " + ".join(
                f"{statistics.median(e['cpu'][each] for e in of):.1f}" for each in of[0]["cpu"]
            ),
            *(
                f"{statistics.median(e[count] for e in of):.4g}"
                for count in COUNTS[1:]
                if count in of[0]
            ),
        )
    console.print(table)
    table = _table("worker's memory, MB", *(f"{number + 1}/{TENTHS}" for number in range(TENTHS)))
    for number, lap in enumerate(laps, 1):
        for kind in ("active", "cache", "resident"):
            parts = [f"{part[kind] / 1e6:.0f}" for part in lap[WORKER]["memory"]]
            table.add_row(f"lap {number}, {kind}", *parts)
    console.print(table)
    table = _table("gaps of rows without pictures, ms", "median", "99%")
    for number, pair in enumerate(beside, 1):
        for name, figures in pair.items():
            gaps = [f"{1000 * figures[gap]:.1f}" for gap in ("gap_p50", "gap_p99")]
            late = ", which ended before them" * bool(figures.get("outlived"))
            table.add_row(f"lap {number}, {name}{' pictures' * (name == 'beside')}{late}", *gaps)
    if beside:
        console.print(table)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _speeds(laps: Sequence[dict[str, Figures]], name: str) -> list[float]:
    """Pictures per second; none of a side that did not run."""
    return [lap[WORKER]["pictures"] / lap[name]["seconds"] for lap in laps if name in lap]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=PAGES, default=DEMO, help="of the model")
    parser.add_argument("--model", type=Path, help="what grow --tower has made, of this size")
    parser.add_argument("--pictures", type=int, default=200, help="of a lap")
    parser.add_argument("--page", type=int, nargs=2, help="its longer and its shorter side, pixels")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each picture")
    parser.add_argument("--at-once", type=int, default=32, help="rows in a batch")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without mlx-vlm")
    parser.add_argument("--beside", type=int, default=4, help="rows without pictures; 0 for none")
    parser.add_argument("--beside-tokens", type=int, default=128, help="of each")
    parser.add_argument("--json", type=Path, help="write the figures here, after every lap")
    args = parser.parse_args()
    args.page = args.page or PAGES[args.size]
    return args


def main() -> None:
    args = parse()
    command = shlex.join(["python", "-m", "scripts.bench.pictures", *sys.argv[1:]])
    head = {"what": "pictures", "size": args.size, "at_once": args.at_once, "page": args.page}
    results = {**head, "command": command, **machine(), "laps": [], "beside": []}
    with ExitStack() as stack:
        bench = Bench(args, stack)
        results["versions"] |= bench.versions
        for number in range(args.laps + 1):
            lap = bench.lap(number)
            beside = bench.streams() if args.beside else None
            kind = f"lap {number}" if number else "warm-up"
            speeds = (f"{name} {each:.2f}" for name in lap for each in _speeds([lap], name))
            print(f"{kind}, pictures/s:", ", ".join(speeds), flush=True)
            if number:
                results["laps"].append(lap)
                results["beside"] += [beside] if beside else []
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    show(results["laps"], results["beside"])


if __name__ == "__main__":
    main()
