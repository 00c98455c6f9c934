"""What was kept on disk is found after a restart, within a limit, and never if it is damaged."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.engine.ragged import prefix_disk
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.ragged.prefix_disk import STALE_SECONDS, Beginning, NotPrivate, PrefixDisk
from tests.helpers.decoding import Loaded
from tests.helpers.families import tiny
from tests.helpers.prefixes import (
    AMPLE,
    DROPS,
    KINDS,
    PROMPT,
    READS,
    RESTARTS,
    Kept,
    Starts,
    equal,
    findable,
    give_up,
    play,
    put,
    settle,
)
from tests.helpers.readers import Held, Network, Reader, StandIn, read_all

ACTS = st.one_of(READS, READS, DROPS, RESTARTS)


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
        starts = Starts(Path(folder), reader := StandIn(*kinds))
        play(reader, script, lambda: starts(limit=limit, memory=memory))
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
        starts = Starts(Path(folder), reader := StandIn(*kinds))
        play(reader, script, lambda: starts(limit=limit, memory=memory))
        starts.end()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_beginning_used_twice_is_found_after_a_restart(start: Starts, dtype: mx.Dtype) -> None:
    class Narrow(StandIn):
        def read(self, tokens: Sequence[int], first: int, last: int, layers: Held) -> Held:
            [keys, values], *others = super().read(tokens, first, last, layers)
            return [[keys.astype(dtype), values], *others]

    reader = start.reader = Narrow("all", "recurrent", "sliding")
    caches = read_all(reader, PROMPT)
    cache = start()
    cache.keep(PROMPT, caches)
    cache.keep(PROMPT, caches)
    cache = start()

    found, taken = cache.find([*PROMPT, 1])
    assert found == 20

    assert taken[0][0].dtype == dtype
    assert equal(reader.arrays(taken), reader.arrays(caches))


def test_a_beginning_used_once_is_not_written(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT, times=1)
    assert start.files == []


def test_taking_up_is_a_use(start: Starts, reader: Reader) -> None:
    cache = start()
    put(cache, reader, PROMPT, times=1)
    cache.find(PROMPT)
    assert len(start.files) == 1


def test_a_conversation_is_written_once_and_read_in_turns(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    cache.find(PROMPT)
    assert sorted(map(span, start.files)) == [(0, 8), (8, 14), (14, 20)]

    cache = start()
    found, taken = cache.find(PROMPT)
    assert found == 20
    assert equal(reader.arrays(taken), reader.arrays(read_all(reader, PROMPT)))


def test_a_turn_is_of_no_use_without_those_before_it(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    [middle] = [path for path in start.files if span(path) == (8, 14)]
    middle.unlink()

    assert start().find(PROMPT)[0] == 8


def test_a_branch_without_its_states_goes_into_the_files_below_it(
    start: Starts, reader: Reader
) -> None:
    cache = start()
    for last in (1, 2, 1):
        put(cache, reader, [*PROMPT, last], times=1)
    assert [span(path) for path in start.files] == [(0, 21)]

    assert start().find([*PROMPT, 1])[0] == 21


def test_another_identity_finds_nothing(start: Starts, reader: Reader) -> None:
    put(start("a model, float16"), reader, PROMPT)

    assert findable(start("a model, float32"), PROMPT) == 0
    assert findable(start("a model, float16"), PROMPT) == 20


def test_the_least_recently_used_file_goes_first(start: Starts, reader: Reader) -> None:
    cache = start("an earlier model")
    put(cache, reader, [9, 9])
    cache = start()
    put(cache, reader, [1, 1])
    put(cache, reader, [2, 2])
    size = max(path.stat().st_size for path in start.files)
    cache = start(limit=3 * size)
    cache.find([1, 1])

    put(cache, reader, [3, 3])
    assert [findable(start(), [n, n]) for n in (1, 2, 3)] == [2, 2, 2]
    assert findable(start("an earlier model"), [9, 9]) == 0
    put(start(limit=3 * size), reader, [4, 4])
    assert [findable(start(), [n, n]) for n in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_the_limit_holds_from_the_start(start: Starts, reader: Reader) -> None:
    cache = start()
    for n in range(5):
        put(cache, reader, [n, n])
    size = max(path.stat().st_size for path in start.files)

    start(limit=2 * size)

    assert sum(path.stat().st_size for path in start.files) <= 2 * size
    assert [findable(start(), [n, n]) for n in range(5)] == [0, 0, 0, 2, 2]


def test_a_beginning_larger_than_the_limit_is_not_written(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)
    size = start.files[0].stat().st_size
    for limit in (100, size - 1):
        put(start(limit=limit), reader, PROMPT[::-1])
    assert findable(start(limit=size - 1), PROMPT[::-1]) == 0


def test_arrays_of_a_file_that_is_not_written_are_not_computed(tmp_path: Path) -> None:
    keys = mx.arange(10_000.0).reshape(1, 1, 10, 1000)
    disk = PrefixDisk(tmp_path, "identity", 1000, LayerSpecs([]), AMPLE)
    before = mx.get_active_memory()

    assert not disk.write(Beginning(array("I", range(10)), 0, None, [keys], []))

    assert mx.get_active_memory() - before < keys.nbytes
    disk.close()


def test_only_files_of_the_cache_are_counted_and_removed(start: Starts, reader: Reader) -> None:
    old = time.time() - STALE_SECONDS - 60
    put(start(), reader, PROMPT)
    [file] = start.files
    theirs = start.folder / "llama" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(bytes(1000))
    unfinished = file.with_name("0.unfinished.safetensors")
    writing = file.with_name("1.unfinished.safetensors")
    for path in (unfinished, writing):
        path.touch()
    os.utime(unfinished, (old, old))

    start(limit=10).close()

    assert theirs.exists()
    assert writing.exists(), "another worker may be writing it"
    assert not unfinished.exists()
    assert not file.exists()


def test_a_full_disk_costs_one_warning_until_a_file_can_be_written(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache = start()
    with patch.object(Path, "replace", side_effect=OSError(28, "No space left on device")):
        for n in range(3):
            put(cache, reader, [n, n])
        assert start.files == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text

    put(start(), reader, [3, 3])
    assert len(start.files) == 1


def test_a_folder_that_cannot_be_written_to_costs_one_warning(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    folder = start.files[0].parent
    cache = start()
    shutil.rmtree(folder)
    for n in range(3):
        put(cache, reader, [n, n])

    assert cache.find(PROMPT)[0] == 20
    assert start.files == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


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
        assert cache._disk
        settle(cache._disk)
        start.end()
    assert [findable(start(), [n, n]) for n in (1, 2)] == [2, 0]

    put(start(), reader, [2, 2])
    assert findable(start(), [2, 2]) == 2


def test_rows_go_on_while_the_disk_stands_still(start: Starts, reader: Reader) -> None:
    cache, free = start(), threading.Event()
    replace = Path.replace

    def wait(path: Path, target: Path) -> Path:
        assert free.wait(60)
        return replace(path, target)

    with patch.object(Path, "replace", wait):
        for n in range(5):
            put(cache, reader, [n, n])
            assert cache.find([n, n, 9])[0] == 2
        free.set()
        assert len(start.files) == 5


def test_a_file_that_cannot_be_written_for_any_reason_is_told_and_does_not_end_the_writing(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache, save = start(), mx.save_safetensors
    with patch.object(mx, "save_safetensors", side_effect=[RuntimeError("no device"), None]):
        put(cache, reader, [1, 1])
        assert cache._disk
        settle(cache._disk)
    assert mx.save_safetensors is save
    put(cache, reader, [2, 2])

    assert len(start.files) == 1
    assert "(no device)" in caplog.text


def test_files_are_read_as_far_as_memory_goes_the_latest_first(
    start: Starts, reader: Reader
) -> None:
    cache = start()
    for n in range(4):
        put(cache, reader, [n, n])
    size = max(path.stat().st_size for path in start.files)

    cache = start(memory=2 * size)
    assert [findable(cache, [n, n]) for n in range(4)] == [0, 0, 2, 2]


def test_what_was_read_gives_way_first_the_oldest_before_the_others(
    start: Starts, reader: Reader
) -> None:
    cache = start()
    for n in range(3):
        put(cache, reader, [n, n])
    cache = start()
    put(cache, reader, [9, 9], times=1)
    assert [findable(cache, [n, n]) for n in (0, 1, 2, 9)] == [2, 2, 2, 2]
    for left in ([0, 2, 2, 2], [0, 0, 2, 2], [0, 0, 0, 2]):
        give_up(cache, 1)
        assert [findable(cache, [n, n]) for n in (0, 1, 2, 9)] == left


def test_nothing_gives_way_to_what_is_read(start: Starts, reader: Reader) -> None:
    put(start(), reader, [1, 1])
    cache = start()
    cache.keep([2, 2], read_all(reader, [2, 2]))
    cache.limit_to(cache.nbytes)

    assert [findable(cache, [n, n]) for n in (1, 2)] == [0, 2]


def test_files_are_closed_to_other_users(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)

    [file] = start.files
    assert file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_5"])
def test_files_of_a_model_fit_the_forms_that_are_found_at_load(
    tmp_path: Path, qwen: Loaded, family: str
) -> None:
    reader = Network(qwen.network if family == "qwen3_5" else tiny(family))
    identity, specs = "a model", reader.specs
    prompts = [PROMPT[:1], PROMPT[:7], [*PROMPT, *PROMPT]]
    for prompt in prompts:
        disk = PrefixDisk(tmp_path, identity, AMPLE, specs, 0)
        put(Kept(specs, AMPLE, disk), reader, prompt)
        disk.close()

    disk = PrefixDisk(tmp_path, identity, AMPLE, specs, AMPLE)
    settle(disk)
    cache = Kept(specs, AMPLE, disk)
    for prompt in prompts:
        found, layers = cache.find(prompt)
        assert found == len(prompt)
        assert equal(reader.arrays(layers), reader.arrays(read_all(reader, prompt)), 1e-3)
    disk.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o1777])
def test_a_folder_that_others_can_open_is_refused(
    tmp_path: Path, reader: Reader, mode: int
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(NotPrivate, match=rf"is {mode & 0o777:04o}, which .*chmod 700 {folder}"):
        Starts(folder, reader)()
    assert list(folder.iterdir()) == []


def test_a_folder_within_it_that_others_can_open_is_refused(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)
    start.files[0].parent.chmod(0o707)

    with pytest.raises(NotPrivate, match="is 0707"):
        start()


def test_a_folder_of_another_user_is_refused(start: Starts) -> None:
    another = patch("os.getuid", return_value=os.getuid() + 1)
    with another, pytest.raises(NotPrivate, match="belongs to another user; give a folder of your"):
        start()


def test_a_folder_that_does_not_exist_is_made_for_its_owner_alone(
    tmp_path: Path, reader: Reader
) -> None:
    folder = tmp_path / "a" / "b"

    Starts(folder, reader)().close()

    assert folder.stat().st_mode & 0o777 == 0o700


def test_workers_that_share_a_folder_keep_no_more_than_the_limit_together(
    start: Starts, tmp_path: Path, reader: Reader
) -> None:
    put(start(), reader, [9, 9])
    size = start.files[0].stat().st_size
    workers = [Starts(tmp_path, reader) for _ in range(2)]
    caches = [worker(limit=4 * size) for worker in workers]

    for n in range(8):
        put(caches[n % 2], reader, [n, n])
        settle(caches[n % 2]._disk)  # type: ignore[arg-type]
        held = [path.stat().st_size for path in tmp_path.glob("*/*.safetensors")]
        assert sum(held) <= 4 * size

    for worker in workers:
        worker.end()
    assert [findable(start(), [n, n]) for n in range(8)] == [0, 0, 0, 0, 2, 2, 2, 2]


def test_a_file_that_another_worker_removes_is_no_loss(
    start: Starts, tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    size = start.files[0].stat().st_size
    ours = start()
    theirs = Starts(tmp_path, reader)
    put(theirs(limit=size), reader, PROMPT[::-1])
    theirs.end()

    assert ours.find(PROMPT)[0] == 20
    put(ours, reader, [9, 9])
    assert len(start.files) == 2
    assert caplog.records == []


def test_a_file_that_is_gone_when_it_is_to_be_read_is_no_loss(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache = start()
    for n in range(2):
        put(cache, reader, [n, n])
    first, _ = start.files
    load = mx.load

    def then_gone(file: str, **options: Any) -> Any:
        first.unlink()
        return load(file, **options)

    with patch.object(mx, "load", then_gone):
        cache = start()
    assert [findable(cache, [n, n]) for n in range(2)] == [0, 2]
    assert caplog.records == []


def test_rows_of_another_salt_find_no_file(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT, salt="theirs")

    for salt, length in (("theirs", 20), ("ours", 0), ("", 0), (None, 0)):
        assert start().find(PROMPT, salt)[0] == length
    put(start(), reader, PROMPT, salt="ours")
    assert len(start.files) == 2
    assert start().find(PROMPT, "ours")[0] == 20
    assert not any(b"ours" in file.read_bytes() for file in start.files), "a salt is not told"


def span(path: Path) -> tuple[int, int]:
    """The positions that a file holds."""
    arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    return int(metadata["start"]), arrays["tokens"].size  # type: ignore[index, call-overload]


def flip(path: Path, at: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)


def flip_number(path: Path) -> None:
    """Change one bit of one array's first number."""
    contents = path.read_bytes()
    header = 8 + int.from_bytes(contents[:8], "little")
    flip(path, header)


DAMAGES = {
    "a byte of the header": lambda path: flip(path, 20),
    "the header's length": lambda path: flip(path, 7),
    "a number": flip_number,
    "the last byte": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 30),
    "empty": lambda path: os.truncate(path, 0),
    "something else": lambda path: path.write_bytes(b"\xff" * 1000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_deleted_and_named_once(
    start: Starts, reader: Reader, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, [9, 9])
    [whole] = start.files
    put(start(), reader, PROMPT)
    [bad] = [path for path in start.files if path != whole]
    damage(bad)

    cache = start()

    assert cache.find(PROMPT) == (0, [])
    assert cache.find([9, 9])[0] == 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(bad) in record.getMessage()
    assert start.files == [whole]
    put(start(), reader, PROMPT)
    assert start().find(PROMPT)[0] == 20


@pytest.mark.parametrize("other", ["identity", "format"])
def test_a_file_of_another_model_or_version_is_never_used(
    start: Starts, reader: Reader, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(prefix_disk, "FORMAT", 0 if other == "format" else prefix_disk.FORMAT):
        put(start("theirs" if other == "identity" else "a model"), reader, PROMPT)
        [theirs] = start.files
    put(start(), reader, [9, 9])
    [ours] = [path.parent for path in start.files if path.parent != theirs.parent]
    shutil.copy(theirs, ours)

    assert start().find(PROMPT)[0] == 0

    assert "belongs to another model or version" in caplog.text
    assert theirs.exists()


def test_a_file_under_the_name_of_other_tokens_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    cache = start()
    put(cache, reader, PROMPT)
    put(cache, reader, PROMPT[::-1])
    one, other = start.files
    one.replace(other)

    cache = start()
    assert cache.find(PROMPT)[0] == cache.find(PROMPT[::-1])[0] == 0
    assert len(caplog.records) == 1


def test_a_file_of_other_layers_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)

    with_a_head = StandIn("all", "recurrent", "sliding", "all")
    assert start(reader=with_a_head).find(PROMPT)[0] == 0
    assert "its arrays have other shapes than the model's" in caplog.text


MISSHAPEN: dict[str, tuple[str, Callable[[mx.array], mx.array]]] = {
    "fewer positions": ("pieces", lambda part: part[..., :-1, :]),
    "more heads": ("pieces", lambda part: mx.concatenate([part, part], axis=1)),
    "wider": ("pieces", lambda part: mx.concatenate([part, part], axis=-1)),
    "flat": ("pieces", lambda part: part.reshape(-1)),
    "pieces of another type": ("pieces", lambda part: part.astype(mx.float16)),
    "states of two rows": ("states", lambda part: mx.concatenate([part, part])),
    "a longer window": ("states", lambda part: mx.concatenate([part, part], axis=-2)),
    "states of another type": ("states", lambda part: part.astype(mx.float16)),
}


@pytest.mark.parametrize("damage", MISSHAPEN.values(), ids=MISSHAPEN)
def test_a_file_with_other_shapes_is_deleted_and_named_once(
    start: Starts,
    reader: Reader,
    damage: tuple[str, Callable[[mx.array], mx.array]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind, change = damage
    write = PrefixDisk.write

    def write_misshapen(disk: PrefixDisk, beginning: Beginning) -> bool:
        parts = [mx.contiguous(change(part)) for part in getattr(beginning, kind)]
        return write(disk, dataclasses.replace(beginning, **{kind: parts}))

    with patch.object(PrefixDisk, "write", write_misshapen):
        put(start(), reader, PROMPT)
        [bad] = start.files

    assert start().find(PROMPT)[0] == 0

    assert not bad.exists()
    [record] = caplog.records
    assert f"{bad}: its arrays have other shapes than the model's" in record.getMessage()


@pytest.mark.parametrize("whose", ["a link", "another user's"])
def test_a_link_or_a_file_of_another_user_is_never_used(
    start: Starts, reader: Reader, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    [file] = start.files
    elsewhere = start.folder / "elsewhere"
    lstat, another = Path.lstat, os.getuid() + 1
    if whose == "a link":
        file.replace(elsewhere)
        file.symlink_to(elsewhere)

    def theirs(path: Path) -> os.stat_result:
        return os.stat_result([*lstat(path)[:4], another, *lstat(path)[5:]])

    with patch.object(Path, "lstat", lstat if whose == "a link" else theirs):
        assert start().find(PROMPT)[0] == 0

    assert "it is another user's" in caplog.text
    assert start.files == []
    assert elsewhere.exists() == (whose == "a link")


WRITER = """
import os, signal, sys, time
from pathlib import Path
import mlx.core as mx
from tests.helpers.prefixes import PROMPT, Starts, put, settle
from tests.helpers.readers import StandIn

folder, point = Path(sys.argv[1]), sys.argv[2]
save, replace = mx.save_safetensors, Path.replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def save_a_part(path, *contents):
    save(path, *contents)
    os.truncate(path, 1000)
    die()

reader = StandIn("all", "recurrent", "sliding")
cache = Starts(folder, reader)()
put(cache, reader, PROMPT)
settle(cache._disk)
if point == "writing":
    mx.save_safetensors = save_a_part
else:
    Path.replace = die if point == "written" else lambda *names: die(replace(*names))
put(cache, reader, PROMPT[::-1])
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["writing", "written", "renamed"])
def test_a_worker_killed_while_it_keeps_a_beginning_leaves_whole_files(
    start: Starts, reader: Reader, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", WRITER, str(start.folder), point]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run(command, env=environment, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL

    cache = start()
    for prompt, wanted in (PROMPT, 20), (PROMPT[::-1], 20 if point == "renamed" else 0):
        found, taken = cache.find(prompt)
        assert found == wanted
        if wanted:
            assert equal(reader.arrays(taken), reader.arrays(read_all(reader, prompt)))
    assert caplog.records == []
