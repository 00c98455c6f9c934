"""A folder of pictures through real workers: no kill changes a row's text, or loses one."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.helpers.bulk_runs import (
    count_lines,
    errors,
    jobs_in_redis,
    lines,
    spawn,
    submit,
    write_jsonl,
)
from tests.helpers.demo_worker import worker
from tests.helpers.image_parts import image, part_of
from tests.helpers.pictured_demo import write_pictured_demo
from tests.helpers.towers import png
from tests.helpers.workers import wait_for

ROWS = 24
SEEDED = ("--seed", "11", "--temperature", "2", "--max-tokens", "16", "--progress", "none")
FOLDER = ("--template", "Who sent it, and when?", "--schema", "sender, date", *SEEDED)


def write_folder(folder: Path) -> list[bytes]:
    """Pictures of five sizes; the last four have the bytes of the first."""
    files = [png(8 + 70 * (n % 5), 270 - 50 * (n % 5), seed=n) for n in range(ROWS - 4)]
    files += files[:4]
    folder.mkdir()
    for n, data in enumerate(files):
        (folder / f"{n:02}.png").write_bytes(data)
    return files


def write_mixed(path: Path, files: list[bytes]) -> None:
    """Chats with two pictures or none."""
    texts = [f"Write function number {n}." for n in range(ROWS // 2)]
    shown = [
        [image(files[n]), part_of(text), image(files[n + 1])] if n % 2 else text
        for n, text in enumerate(texts)
    ]
    write_jsonl(path, [{"messages": [{"role": "user", "content": each}]} for each in shown])


def choices(output: Path) -> dict[str, Any]:
    """What each row has as its result; it has one."""
    results = lines(output)
    assert errors(output) == []
    by_id = {line["custom_id"]: line["response"]["body"]["choices"] for line in results}
    assert len(by_id) == len(results)
    return by_id


@pytest.mark.timeout(900)  # as long as its waits together, on a machine that others load
def test_texts_of_pictures_survive_the_killing_of_the_worker_and_the_client(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    model = write_pictured_demo(tmp_path / "pictured")
    write_mixed(tmp_path / "mixed.jsonl", write_folder(tmp_path / "scans"))

    with worker(redis_url, "--max-batch", "1", "--mode", "batched", model=model):
        for source, options in (("scans", FOLDER), ("mixed.jsonl", SEEDED)):
            calm = ("run", source, "-o", f"calm-{Path(source).stem}.jsonl", *options)
            code, _, err = submit(redis_url, tmp_path, *calm, seconds=250)
            assert code == 0, err

    with contextlib.ExitStack() as stack:

        def start_worker() -> subprocess.Popen[bytes]:
            options = ("--max-batch", "6", "--lease-seconds", "2")
            return stack.enter_context(worker(redis_url, *options, model=model))

        def start_client(source: str, *options: str) -> subprocess.Popen[str]:
            run = ("run", source, "-o", f"killed-{Path(source).stem}.jsonl", *options)
            client = spawn(redis_url, tmp_path, *run)
            stack.callback(client.kill)
            return client

        dying = start_worker()
        clients = [start_client("scans", *FOLDER), start_client("mixed.jsonl", *SEEDED)]
        output = tmp_path / "killed-scans.jsonl"
        wait_for(lambda: count_lines(output) >= 4, 250, "the first results")
        dying.kill()
        clients[0].kill()
        clients[0].communicate()
        assert count_lines(output) < ROWS
        clients[0] = start_client("scans", *FOLDER)
        start_worker()
        for client in clients:
            _, err = client.communicate(timeout=250)
            assert client.returncode == 0, err

    scans = choices(tmp_path / "calm-scans.jsonl")
    mixed = choices(tmp_path / "calm-mixed.jsonl")
    assert list(map(len, (scans, mixed))) == [ROWS, ROWS // 2]
    assert len(set(map(str, scans.values()))) > ROWS // 2
    assert choices(output) == scans
    assert choices(tmp_path / "killed-mixed.jsonl") == mixed
    assert jobs_in_redis(connection) == 0
