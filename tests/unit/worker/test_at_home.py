"""What commands of one machine share: the first starts it, and ends it when no other uses it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from omlx_worker import at_home


class Thing:
    """What is shared, and what was told."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.runs = False
        self.starts = 0
        self.told: list[str] = []
        self.starting = threading.Event()
        self.may_start = threading.Event()
        self.may_start.set()

    @contextlib.contextmanager
    def start(self, _runs: IO[bytes]) -> Iterator[tuple[str, at_home.Check]]:
        self.starts += 1
        self.starting.set()
        assert self.may_start.wait(20)
        self.runs = True
        try:
            yield "started", at_home.nothing
        finally:
            self.runs = False

    def used(self) -> contextlib.AbstractContextManager[tuple[str, at_home.Check]]:
        return at_home.shared(
            self.place, lambda: "found" if self.runs else None, self.start, self.told.append
        )


class User(threading.Thread):
    """A command that uses the thing until it is told to leave."""

    def __init__(self, thing: Thing) -> None:
        super().__init__(daemon=True)
        self.thing = thing
        self.got = ""
        self.inside, self.may_leave = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.thing.used() as (self.got, self.check):
            self.inside.set()
            assert self.may_leave.wait(20)
            self.check()
            assert self.thing.runs

    def leave(self) -> None:
        self.may_leave.set()
        self.join(20)
        assert not self.is_alive()


@pytest.fixture
def thing(tmp_path: Path) -> Thing:
    return Thing(tmp_path / "folder" / "thing")


def test_the_first_starts_it_and_ends_it(thing: Thing) -> None:
    with thing.used() as (got, _):
        assert (got, thing.runs) == ("started", True)
    assert not thing.runs
    with thing.used() as (got, _):
        assert got == "started"
    assert thing.told == []


def test_the_first_waits_for_the_others_at_its_end(thing: Thing) -> None:
    first = User(thing)
    assert first.inside.wait(20)
    second = User(thing)
    assert second.inside.wait(20)
    assert (first.got, second.got) == ("started", "found")
    first.may_leave.set()
    while not thing.told:
        first.join(0.01)
    assert thing.told == ["another command uses it; Ctrl-C ends both"]
    assert thing.runs
    second.leave()
    first.leave()
    assert not thing.runs


def test_one_that_comes_while_it_starts_waits_for_that(thing: Thing) -> None:
    thing.may_start.clear()
    first = User(thing)
    assert thing.starting.wait(20)
    second = User(thing)
    while not thing.told:
        second.join(0.01)
    assert thing.told == ["another command starts it"]
    thing.may_start.set()
    assert first.inside.wait(20)
    assert second.inside.wait(20)
    assert (first.got, second.got, thing.starts) == ("started", "found", 1)
    second.leave()
    first.leave()


def test_an_error_ends_it_although_others_use_it(thing: Thing) -> None:
    with contextlib.suppress(KeyboardInterrupt), thing.used():
        other = User(thing)
        assert other.inside.wait(20)
        other.check()
        raise KeyboardInterrupt
    assert not thing.runs
    with pytest.raises(at_home.Gone, match="the thing of another command has ended"):
        other.check()
    thing.runs, other.check = True, at_home.nothing
    other.leave()


def test_one_that_no_command_has_started_may_come_back(thing: Thing) -> None:
    thing.runs = True
    with thing.used() as (_, check), thing.used() as (_, other_check):
        thing.runs = False
        check()
        other_check()


def test_it_is_in_use_as_long_as_a_process_that_was_started_for_it(thing: Thing) -> None:
    @contextlib.contextmanager
    def start(runs: IO[bytes]) -> Iterator[tuple[str, at_home.Check]]:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[runs.fileno()])
        thing.runs = True
        yield process, at_home.nothing

    with at_home.shared(thing.place, lambda: None, start, thing.told.append) as (process, _):
        pass
    with process, thing.used() as (_, check):
        check()
        process.kill()
        process.wait()
        with pytest.raises(at_home.Gone):
            check()
