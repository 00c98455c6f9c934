"""A file that is damaged, foreign or of another version is never used."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from omlx_worker.engine.ragged import prefix_disk, prefix_file
from omlx_worker.engine.ragged.prefix_file import Contents, Span, Tokens
from tests.helpers.prefixes import PROMPT, Starts, equal, findable, put
from tests.helpers.readers import Reader, StandIn, read_all


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
    assert cache.take(PROMPT) == (0, [])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "it is damaged" in caplog.text
    assert findable(cache, PROMPT) == 0
    assert start.files == []


def test_a_file_that_is_gone_is_not_used(start: Starts, reader: Reader) -> None:
    put(start(), reader, PROMPT)
    [file] = start.files
    cache = start()
    file.unlink()

    assert cache.take(PROMPT)[0] == 0
    put(cache, reader, PROMPT)
    assert len(start.files) == 1


def test_a_file_of_another_identity_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start("theirs"), reader, PROMPT)
    [theirs] = start.files
    put(start("ours"), reader, [9, 9])
    [ours] = [path.parent for path in start.files if path.parent != theirs.parent]
    shutil.copy(theirs, ours)
    cache = start("ours")

    assert cache.take(PROMPT)[0] == 0

    assert "belongs to another model or version" in caplog.text
    assert theirs.exists()


def test_a_file_of_another_format_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(prefix_file, "FORMAT", 0):
        put(start(), reader, PROMPT)
        start.end()

    assert start().take(PROMPT)[0] == 0
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

    assert start().take(PROMPT[::-1])[0] == 0
    assert "it holds other tokens" in caplog.text


def test_a_file_of_other_layers_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)

    with_a_head = StandIn("all", "recurrent", "sliding", "all")
    cache = start(reader=with_a_head)
    assert cache.take(PROMPT)[0] == 0
    assert "it belongs to other layers" in caplog.text


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

    class Misshapen(Contents):
        def __init__(
            self, identity: str, tokens: Tokens, span: Span, pieces: Any, states: Any
        ) -> None:
            arrays = {"pieces": pieces, "states": states}
            arrays[kind] = [mx.contiguous(change(part)) for part in arrays[kind]]
            super().__init__(identity, tokens, span, **arrays)

    with patch.object(prefix_disk, "Contents", Misshapen):
        put(start(), reader, PROMPT)
        [bad] = start.files
    cache = start()

    for _ in range(3):
        assert cache.take(PROMPT)[0] == 0

    assert not bad.exists()
    [record] = caplog.records
    assert f"{bad}: its arrays have other shapes than the model's" in record.getMessage()
    put(cache, reader, PROMPT)
    assert findable(start(), PROMPT) == 20


def test_a_file_of_another_user_is_never_used(
    start: Starts, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), reader, PROMPT)
    [file] = start.files
    cache = start()
    elsewhere = file.replace(start.folder / "elsewhere")
    file.symlink_to(elsewhere)

    assert cache.take(PROMPT)[0] == 0

    assert "it is another user's" in caplog.text
    assert elsewhere.exists()
    assert not file.is_symlink()


WRITER = """
import os, signal, sys, time
from pathlib import Path
from omlx_worker.engine.ragged import prefix_disk
from tests.helpers.prefixes import PROMPT, Starts, put
from tests.helpers.readers import StandIn

folder, point = Path(sys.argv[1]), sys.argv[2]
name_of, replace = prefix_disk.name_of, Path.replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def written_in_part(parts):
    yield from parts[:-1]
    die()

def name_and_die_writing(span, contents):
    name = name_of(span, contents)
    contents.parts = written_in_part(contents.parts)
    return name

reader = StandIn("all", "recurrent", "sliding")
cache = Starts(folder, reader)()
put(cache, reader, PROMPT)
while not list(folder.glob("*/*.safetensors")):
    time.sleep(0.01)
if point == "writing":
    prefix_disk.name_of = name_and_die_writing
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
        found, taken = cache.take(prompt)
        assert found == wanted
        if wanted:
            assert equal(reader.arrays(taken), reader.arrays(read_all(reader, prompt)))
    assert caplog.records == []
