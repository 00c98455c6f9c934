"""A terminal emulator: what a person sees of a command at some width."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from typing import Self

import pyte
import pytest

ROWS = 24


class Screen:
    """The lines that a terminal shows; bytes or text go in."""

    def __init__(self, columns: int) -> None:
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    def __repr__(self) -> str:
        return "\n".join(["a screen:", *self.lines])

    @property
    def lines(self) -> list[str]:
        """The lines with text, without spaces at their ends."""
        shown = [line.rstrip() for line in self._screen.display]
        return [line for line in shown if line]


class _Raw(io.RawIOBase):
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._screen.feed(bytes(data).replace(b"\n", b"\r\n"))
        return len(data)


def attach(patch: pytest.MonkeyPatch, columns: int, *, stream: str = "stderr") -> Screen:
    """Put a terminal in the place of stdout or stderr."""
    screen = Screen(columns)
    patch.setenv("COLUMNS", str(columns))
    patch.setenv("LINES", str(ROWS))
    patch.setenv("TERM", "xterm")
    patch.setattr(sys, stream, io.TextIOWrapper(io.BufferedWriter(_Raw(screen)), encoding="utf-8"))
    return screen


class Session:
    """A process on a terminal of its own, whose screen is followed."""

    def __init__(self, command: Sequence[str], columns: int, **options: object) -> None:
        self.screen = Screen(columns)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        env = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        env |= {"TERM": "xterm", **options.pop("env", {})}  # type: ignore[dict-item]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            preexec_fn=lambda: os.login_tty(slave),
            **options,  # type: ignore[call-overload]
        )
        os.close(slave)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._thread.join(10)
        os.close(self._master)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self, seconds: float = 60) -> int:
        """The exit code, once the screen is complete."""
        code = self.process.wait(seconds)
        self._thread.join(10)
        return code

    def _follow(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                # Linux says so when the last process has closed the terminal.
                return
            if not data:
                return
            self.screen.feed(data)
