"""What was kept on disk is found after a restart; what is damaged or foreign is never used."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.engine.ragged import prefix_disk, prefix_file
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_disk import STALE_SECONDS, PrefixDisk
from tests.helpers.prefixes import AMPLE, DROPS, KINDS, READS, RESTARTS, equal, play
from tests.helpers.readers import Reader, StandIn, read_all

PROMPT = [*range(20)]
ACTS = st.one_of(READS, READS, DROPS, RESTARTS)


class Starts:
    """Caches over one folder, each made when the one before it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._disk: PrefixDisk | None = None

    def __call__(
        self, identity: str = "a model", limit: int = AMPLE, memory: int = AMPLE
    ) -> PrefixCache:
        self.end()
        self._disk = PrefixDisk(self.folder, identity, limit)
        return PrefixCache(memory, self._disk)

    def end(self) -> None:
        if self._disk:
            self._disk.close()
        self._disk = None

    @property
    def files(self) -> list[Path]:
        """Those kept, the least recently used first."""
        self.end()
        found = self.folder.glob("*/*.safetensors")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    starts = Starts(tmp_path)
    yield starts
    starts.end()


@pytest.fixture
def reader() -> Reader:
    return StandIn("all", "recurrent", "sliding")


def put(cache: PrefixCache, reader: Reader, prompt: list[int], times: int = 2) -> None:
    for _ in range(times):
        cache.put(prompt, read_all(reader, prompt))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=15, deadline=None)
@given(
    script=st.lists(ACTS, max_size=14),
    limit=st.sampled_from([3_000, AMPLE]),
    memory=st.sampled_from([300, 1000, AMPLE]),
)
def test_rows_are_exact_across_restarts(
    kinds: tuple[str, ...], script: list[Any], limit: int, memory: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(Path(folder))
        play(StandIn(*kinds), script, lambda: starts(limit=limit, memory=memory))
        starts.end()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(ACTS, max_size=40),
    limit=st.sampled_from([3_000, 10_000, AMPLE]),
    memory=st.sampled_from([300, 1000, AMPLE]),
)
def test_rows_are_exact_across_many_restarts(
    kinds: tuple[str, ...], script: list[Any], limit: int, memory: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        starts = Starts(Path(folder))
        play(StandIn(*kinds), script, lambda: starts(limit=limit, memory=memory))
        starts.end()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_beginning_used_twice_is_found_after_a_restart(
    start: Starts, reader: Reader, dtype: mx.Dtype
) -> None:
    caches = read_all(reader, PROMPT)
    caches[0].keys = caches[0].keys.astype(dtype)
    cache = start()
    cache.put(PROMPT, caches)
    cache.put(PROMPT, caches)
    cache = start()
    taken = reader.caches()

    assert cache.find([*PROMPT, 1]) == cache.take([*PROMPT, 1], taken) == 20

    assert taken[0].keys.dtype == dtype
    assert equal(reader.arrays(taken), reader.arrays(caches))


def test_a_beginning_used_once_is_not_written(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT, times=1)
    assert start.files == []


def test_taking_up_is_a_use(start: Starts, reader: Reader) -> None:
    cache = start()
    put(cache, reader, PROMPT, times=1)
    cache.take(PROMPT, reader.caches())
    assert len(start.files) == 1


def test_a_conversation_is_written_once_and_read_in_turns(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    cache.take(PROMPT, reader.caches())
    spans = sorted(path.name.rsplit("-", 2)[0] for path in start.files)
    assert spans == ["0-8", "14-20", "8-14"]

    cache = start()
    taken = reader.caches()
    assert cache.find(PROMPT) == cache.take(PROMPT, taken) == 20
    assert equal(reader.arrays(taken), reader.arrays(read_all(reader, PROMPT)))


def test_a_turn_is_of_no_use_without_those_before_it(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    [middle] = [path for path in start.files if path.name.startswith("8-14-")]
    middle.unlink()

    cache = start()
    assert cache.find(PROMPT) == cache.take(PROMPT, reader.caches()) == 8


def test_files_and_tree_complete_each_other(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 20):
        put(cache, reader, PROMPT[:end])
    for file in start.files:
        if file.name.startswith("0-8-"):
            file.unlink()
    cache = start()
    assert cache.find(PROMPT) == 0
    put(cache, reader, PROMPT[:12], times=1)
    taken = reader.caches()

    assert cache.take(PROMPT, taken) == 20

    assert equal(reader.arrays(taken), reader.arrays(read_all(reader, PROMPT)))


def flip(path: Path, at: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)


DAMAGES = {
    "a byte of the header": lambda path: flip(path, 20),
    "the last byte": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_never_used(
    start: Starts, reader: Reader, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    damage(start.files[0])
    cache = start()
    caches = reader.caches()

    assert cache.take(PROMPT, caches) == 0

    assert all(cache.empty() for cache in caches)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "it is damaged" in caplog.text
    assert cache.find(PROMPT) == 0
    assert start.files == []


def test_a_file_that_is_gone_is_not_used(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)
    [file] = start.files
    cache = start()
    file.unlink()

    assert cache.take(PROMPT, reader.caches()) == 0
    put(cache, reader, PROMPT)
    assert len(start.files) == 1


def test_another_identity_finds_nothing(start: Starts, reader: Reader) -> None:
    put(start("a model, float16"), reader, PROMPT)

    assert start("a model, float32").find(PROMPT) == 0
    assert start("a model, float16").find(PROMPT) == 20


def test_a_file_of_another_identity_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start("theirs"), reader, PROMPT)
    [theirs] = start.files
    put(start("ours"), reader, [9, 9])
    [ours] = [path.parent for path in start.files if path.parent != theirs.parent]
    shutil.copy(theirs, ours)
    cache = start("ours")

    assert cache.take(PROMPT, reader.caches()) == 0

    assert "belongs to another model or version" in caplog.text
    assert theirs.exists()


def test_a_file_of_another_format_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(prefix_file, "FORMAT", 0):
        put(start(), reader, PROMPT)
        start.end()

    assert start().take(PROMPT, reader.caches()) == 0
    assert "belongs to another model or version" in caplog.text


def test_a_file_under_the_name_of_other_tokens_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache = start()
    put(cache, reader, PROMPT)
    put(cache, reader, PROMPT[::-1])
    one, other = start.files
    names = one.name.split("-"), other.name.split("-")
    one.rename(one.with_name("-".join([*names[1][:3], names[0][3]])))
    other.unlink()

    assert start().take(PROMPT[::-1], reader.caches()) == 0
    assert "it holds other tokens" in caplog.text


def test_a_file_of_other_layers_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)

    with_a_head = StandIn("all", "recurrent", "sliding", "all")
    assert start().take(PROMPT, with_a_head.caches()) == 0
    assert "it belongs to other layers" in caplog.text


def test_the_least_recently_used_file_goes_first(start: Starts, reader: Reader) -> None:
    cache = start("an earlier model")
    put(cache, reader, [9, 9])
    cache = start()
    put(cache, reader, [1, 1])
    put(cache, reader, [2, 2])
    size = max(path.stat().st_size for path in start.files)
    cache = start(limit=3 * size)
    cache.take([1, 1], reader.caches())

    put(cache, reader, [3, 3])
    assert [start().find([n, n]) for n in (1, 2, 3)] == [2, 2, 2]
    assert start("an earlier model").find([9, 9]) == 0
    put(start(limit=3 * size), reader, [4, 4])
    assert [start().find([n, n]) for n in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_the_limit_holds_from_the_start(start: Starts, reader: Reader) -> None:
    cache = start()
    for n in range(5):
        put(cache, reader, [n, n])
    size = max(path.stat().st_size for path in start.files)

    start(limit=2 * size)

    assert sum(path.stat().st_size for path in start.files) <= 2 * size
    assert [start().find([n, n]) for n in range(5)] == [0, 0, 0, 2, 2]


def test_a_beginning_larger_than_the_limit_is_not_written(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)
    size = start.files[0].stat().st_size
    for limit in (100, size - 1):
        put(start(limit=limit), reader, PROMPT[::-1])
    assert start(limit=size - 1).find(PROMPT[::-1]) == 0


def test_only_files_of_the_cache_are_counted_and_removed(start: Starts, reader: Reader) -> None:
    old = time.time() - STALE_SECONDS - 60
    theirs = start.folder / "llama" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(bytes(1000))
    unfinished = theirs.with_name(f"{'0' * 32}.unfinished")
    writing = theirs.with_name(f"{'1' * 32}.unfinished")
    for path in (unfinished, writing):
        path.touch()
    os.utime(unfinished, (old, old))

    start(limit=10)

    assert theirs.exists()
    assert writing.exists(), "another worker may be writing it"
    assert not unfinished.exists()


def test_a_full_disk_costs_one_log_line(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache = start()
    with patch.object(Path, "replace", side_effect=OSError(28, "No space left on device")):
        put(cache, reader, PROMPT)
        start.end()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text
    assert list(start.folder.glob("*/*")) == []


def test_what_would_wait_too_long_is_written_at_a_later_use(start: Starts, reader: Reader) -> None:
    cache, free = start(), threading.Event()
    replace = Path.replace

    def wait(path: Path, target: Path) -> Path:
        assert free.wait(60)
        return replace(path, target)

    with patch.object(prefix_disk, "QUEUED_BYTES", 0), patch.object(Path, "replace", wait):
        put(cache, reader, [1, 1])
        put(cache, reader, [2, 2])
        free.set()
        start.end()
    assert [start().find([n, n]) for n in (1, 2)] == [2, 0]

    put(start(), reader, [2, 2])
    assert start().find([2, 2]) == 2


WRITER = """
import sys
from itertools import count
from pathlib import Path
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_disk import PrefixDisk
from tests.helpers.readers import StandIn, read_all

reader = StandIn("all", "recurrent")
cache = PrefixCache(1 << 30, PrefixDisk(Path(sys.argv[1]), "a model", 1 << 30))
print(flush=True)
for n in count():
    prompt = [n % 256, n // 256 % 256, *[0] * 3000]
    for _ in range(2):
        cache.put(prompt, read_all(reader, prompt))
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.02, 0.05, 0.11, 0.23, 0.31])
def test_a_worker_killed_while_it_writes_leaves_whole_files(
    start: Starts, delay: float, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", WRITER, str(start.folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        worker.stdout.readline()
        while not list(start.folder.glob("*/*.safetensors")):
            time.sleep(0.01)
        time.sleep(delay)
        worker.send_signal(signal.SIGKILL)

    reader, cache = StandIn("all", "recurrent"), start()
    found = len(list(start.folder.glob("*/*.safetensors")))
    assert found
    for n in range(found):
        prompt = [n, 0, *[0] * 3000]
        taken = reader.caches()
        assert cache.take(prompt, taken) == len(prompt)
        assert equal(reader.arrays(taken), reader.arrays(read_all(reader, prompt)))
    assert caplog.records == []
