"""What was kept on disk is found after a restart, within a limit."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.engine.ragged import prefix_disk
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import Forms, Layers
from omlx_worker.engine.ragged.prefix_disk import STALE_SECONDS, NotPrivate, PrefixDisk
from omlx_worker.engine.ragged.prefix_file import Contents, Span
from tests.helpers.decoding import Loaded
from tests.helpers.families import tiny
from tests.helpers.prefixes import (
    AMPLE,
    DROPS,
    KINDS,
    PROMPT,
    READS,
    RESTARTS,
    Starts,
    equal,
    findable,
    play,
    put,
)
from tests.helpers.readers import Network, Reader, StandIn, read_all

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
        def read(self, tokens: Sequence[int], first: int, last: int, layers: Layers) -> Layers:
            [keys, values], *others = super().read(tokens, first, last, layers)
            return [[keys.astype(dtype), values], *others]

    reader = start.reader = Narrow("all", "recurrent", "sliding")
    caches = read_all(reader, PROMPT)
    cache = start()
    cache.put(PROMPT, caches)
    cache.put(PROMPT, caches)
    cache = start()

    found, taken = cache.take([*PROMPT, 1])
    assert findable(cache, [*PROMPT, 1]) == found == 20

    assert taken[0][0].dtype == dtype
    assert equal(reader.arrays(taken), reader.arrays(caches))


def test_a_beginning_used_once_is_not_written(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT, times=1)
    assert start.files == []


def test_taking_up_is_a_use(start: Starts, reader: Reader) -> None:
    cache = start()
    put(cache, reader, PROMPT, times=1)
    cache.take(PROMPT)
    assert len(start.files) == 1


def test_a_conversation_is_written_once_and_read_in_turns(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    cache.take(PROMPT)
    spans = sorted(path.name.rsplit("-", 2)[0] for path in start.files)
    assert spans == ["0-8", "14-20", "8-14"]

    cache = start()
    found, taken = cache.take(PROMPT)
    assert findable(cache, PROMPT) == found == 20
    assert equal(reader.arrays(taken), reader.arrays(read_all(reader, PROMPT)))


def test_a_turn_is_of_no_use_without_those_before_it(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 14, 20):
        put(cache, reader, PROMPT[:end])
    [middle] = [path for path in start.files if path.name.startswith("8-14-")]
    middle.unlink()

    cache = start()
    assert findable(cache, PROMPT) == cache.take(PROMPT)[0] == 8


def test_a_branch_without_its_states_goes_into_the_files_below_it(
    start: Starts, reader: Reader
) -> None:
    cache = start()
    for last in (1, 2, 1):
        put(cache, reader, [*PROMPT, last], times=1)
    [file] = start.files
    assert file.name.startswith("0-21-")

    assert start().take([*PROMPT, 1])[0] == 21


def test_files_and_tree_complete_each_other(start: Starts, reader: Reader) -> None:
    cache = start()
    for end in (8, 20):
        put(cache, reader, PROMPT[:end])
    for file in start.files:
        if file.name.startswith("0-8-"):
            file.unlink()
    cache = start()
    assert findable(cache, PROMPT) == 0
    put(cache, reader, PROMPT[:12], times=1)

    found, taken = cache.take(PROMPT)
    assert found == 20

    assert equal(reader.arrays(taken), reader.arrays(read_all(reader, PROMPT)))


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
    cache.take([1, 1])

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
    disk = PrefixDisk(tmp_path, "identity", 1000, Forms([]))
    keys = mx.arange(10_000.0).reshape(1, 1, 10, 1000)
    before = mx.get_active_memory()

    disk.write(array("I", range(10)), 0, [keys], [])

    assert mx.get_active_memory() - before < keys.nbytes
    disk.close()


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
    assert [findable(start(), [n, n]) for n in (1, 2)] == [2, 0]

    put(start(), reader, [2, 2])
    assert findable(start(), [2, 2]) == 2


def test_a_file_that_cannot_be_written_for_any_reason_is_told_and_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = PrefixDisk(tmp_path, "identity", AMPLE, Forms([]))
    first, second = array("I", range(10)), array("I", range(20, 30))
    save = PrefixDisk._save

    def failing(disk: PrefixDisk, span: Span, contents: Contents) -> None:
        if span == Span.of(first, 0):
            raise RuntimeError("no such device")
        save(disk, span, contents)

    monkeypatch.setattr(PrefixDisk, "_save", failing)
    for tokens in (first, second):
        disk.write(tokens, 0, [mx.ones((1, 1, 10, 4))], [])
    disk.close()

    assert "(no such device)" in caplog.text
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1


def test_a_file_that_is_removed_while_it_is_written_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PrefixDisk(tmp_path, "identity", AMPLE, Forms([]))
    first, second = array("I", range(10)), array("I", range(20, 30))
    keys = [mx.ones((1, 1, 10, 4))]
    save, removed = PrefixDisk._save, threading.Event()

    def then_removed(disk: PrefixDisk, *args: Any) -> None:
        save(disk, *args)
        if not removed.is_set():
            for path in tmp_path.glob("*/*.safetensors"):
                path.unlink()  # another worker makes room
            if not disk.touch(first, 0):  # this worker uses the beginning again
                disk.write(first, 0, keys, [])
            removed.set()

    monkeypatch.setattr(PrefixDisk, "_save", then_removed)
    disk.write(first, 0, keys, [])
    assert removed.wait(10)
    disk.write(second, 0, keys, [])
    disk.close()

    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1


def test_files_are_closed_to_other_users(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)

    [file] = start.files
    assert file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_5"])
def test_files_of_a_model_fit_the_forms_that_are_found_at_load(
    tmp_path: Path, qwen: Loaded, family: str
) -> None:
    reader = Network(qwen.network if family == "qwen3_5" else tiny(family))
    identity, forms = "a model", reader.forms
    prompts = [PROMPT[:1], PROMPT[:7], [*PROMPT, *PROMPT]]
    disk = PrefixDisk(tmp_path, identity, AMPLE, forms)
    for prompt in prompts:
        put(PrefixCache(forms, AMPLE, disk), reader, prompt)
    disk.close()

    disk = PrefixDisk(tmp_path, identity, AMPLE, forms)
    for prompt in prompts:
        found, layers = PrefixCache(forms, AMPLE, disk).take(prompt)
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
        settle(caches[n % 2])
        held = [path.stat().st_size for path in tmp_path.glob("*/*.safetensors")]
        assert sum(held) <= 4 * size

    for worker in workers:
        worker.end()
    assert [findable(start(), [n, n]) for n in range(8)] == [0, 0, 0, 0, 2, 2, 2, 2]


def test_a_file_that_another_worker_has_removed_is_read_again_without_a_word(
    start: Starts, tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    size = start.files[0].stat().st_size
    ours = start()
    theirs = Starts(tmp_path, reader)
    put(theirs(limit=size), reader, PROMPT[::-1])
    theirs.end()

    assert ours.take(PROMPT)[0] == 0
    put(ours, reader, PROMPT)

    assert caplog.records == []
    assert findable(start(), PROMPT) == 20


def test_rows_of_another_salt_find_no_file(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT, salt="theirs")

    for salt, length in (("theirs", 20), ("ours", 0), ("", 0), (None, 0)):
        assert start().take(PROMPT, salt)[0] == length
    put(start(), reader, PROMPT, salt="ours")
    assert len(start.files) == 2
    assert start().take(PROMPT, "ours")[0] == 20


def settle(cache: PrefixCache) -> None:
    """Wait until everything is written."""
    while cache._disk and cache._disk._waiting:
        time.sleep(0.001)
