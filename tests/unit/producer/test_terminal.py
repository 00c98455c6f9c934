"""Foreign text cannot control the terminal, and reaches files unchanged."""

from __future__ import annotations

import io
import sys

import pytest

from omlx_producer.program import fail
from omlx_producer.terminal import duration, in_units, one_cell, write


class Screen(io.TextIOWrapper):
    """A stdout that keeps its bytes."""

    def __init__(self, *, terminal: bool) -> None:
        self.kept = io.BytesIO()
        self.terminal = terminal
        super().__init__(self.kept, encoding="ascii")

    def isatty(self) -> bool:
        return self.terminal


def written(monkeypatch: pytest.MonkeyPatch, *texts: str, terminal: bool) -> bytes:
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    for text in texts:
        write(text)
    return screen.kept.getvalue()


HOSTILE = "a\x1b[31mred\x1b]0;title\x07\r\x7f\x9bclip\tb\nwörld"
SHOWN = "a\\x1b[31mred\\x1b]0;title\\x07\\x0d\\x7f\\x9bclip\tb\nwörld"


def test_a_terminal_shows_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, HOSTILE, terminal=True).decode() == SHOWN


def test_a_sequence_that_comes_in_pieces_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, *HOSTILE, terminal=True).decode() == SHOWN


def test_elsewhere_every_character_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, HOSTILE, terminal=False).decode() == HOSTILE


def test_half_a_surrogate_pair_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, "a\ud83db", terminal=False) == b"a\\ud83db"


def test_errors_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    write("a", err=True)
    assert capsys.readouterr() == ("", "a")


def test_an_error_on_a_terminal_is_escaped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit):
        fail(2, "no worker is named \x1b[2J")
    assert screen.kept.getvalue().endswith(b": no worker is named \\x1b[2J\n")


def test_a_cell_stays_on_one_line() -> None:
    assert one_cell("a\nb\tc\x1b") == "a\\x0ab\\x09c\\x1b"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1048576.0 GiB"),
    ],
)
def test_bytes_are_told_in_units_for_people(count: int, text: str) -> None:
    assert in_units(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.23, "1.2 s"), (12.3, "12 s"), (61, "1 min 01 s"), (7_260, "2 h 01 min"), (200_000, "2 d")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
