"""Record the demo on a terminal and write it as an animated SVG, for the README.

Usage: python -m scripts.record_demo [OUTPUT.svg]. Needs the extra dev. The recording is real: the
demo runs under a pseudo-terminal, and every frame is a screen that it showed, at its own pace.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from html import escape
from pathlib import Path
from select import select

import pyte

COLUMNS, ROWS = 100, 30
FRAME_SECONDS = 0.25
QUIET_SECONDS = 0.02
"""A screen is whole when nothing has been written for this long."""
LAST_SECONDS = 6.0
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 18, 12
NO_BREAK = "\N{NO-BREAK SPACE}"

BACKGROUND, FOREGROUND, DIM = "#15181d", "#d5d9e0", "#7d8590"
COLOURS = {
    **{"black": "#3b4048", "red": "#ff6b68", "green": "#6bd968", "brown": "#e5c454"},
    **{"blue": "#6ca8ff", "magenta": "#d890f0", "cyan": "#5ccfe6", "white": FOREGROUND},
}

Frame = list[str]
"""The lines of a screen, each as the inside of a ``text`` element."""


class Screen(pyte.Screen):
    """pyte's screen, which knows no dim text: it is shown as bright black."""

    def select_graphic_rendition(self, *attributes: int, **kwargs: bool) -> None:
        attributes = tuple(90 if attribute == 2 else attribute for attribute in attributes)
        super().select_graphic_rendition(*attributes, **kwargs)


def record(command: list[str]) -> list[tuple[float, Frame]]:
    """Run a command on a terminal. Returns its screens, and when each appeared."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[tuple[float, Frame]] = []
    began = shown = time.monotonic()
    while True:
        ready, _, _ = select([reader], [], [], QUIET_SECONDS)
        if ready:
            try:
                stream.feed(os.read(reader, 65536))
            except OSError:
                break
        elif time.monotonic() - shown >= FRAME_SECONDS:
            shown = time.monotonic()
            _add(frames, shown - began, screen)
    _add(frames, time.monotonic() - began, screen)
    os.close(reader)
    if process.wait():
        sys.exit(f"the demo ended with {process.returncode}")
    print("\n".join(line.rstrip() for line in screen.display))
    return frames


def _add(frames: list[tuple[float, Frame]], at: float, screen: Screen) -> None:
    frame = [_line(screen, row) for row in range(ROWS)]
    if not frames or frames[-1][1] != frame:
        frames.append((at, frame))


def _line(screen: Screen, row: int) -> str:
    """A line as ``tspan`` elements, one for each run of a style."""
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    spans, start = [], 0
    for end in range(1, COLUMNS + 1):
        if end < COLUMNS and _style(cells[end]) == _style(cells[start]):
            continue
        padded = "".join(cell.data for cell in cells[start:end])
        if text := padded.strip():
            colour, bold = _style(cells[start])
            weight = ' font-weight="bold"' if bold else ""
            left = start + len(padded) - len(padded.lstrip())
            x, width = MARGIN + left * CELL_WIDTH, len(text) * CELL_WIDTH
            spans.append(
                f'<tspan x="{x:.1f}" textLength="{width:.1f}" fill="{colour}"{weight}>'
                f"{escape(text).replace(' ', NO_BREAK)}</tspan>"
            )
        start = end
    return "".join(spans)


def _style(cell: pyte.screens.Char) -> tuple[str, bool]:
    name = cell.fg.removeprefix("bright")
    if cell.fg == "brightblack":
        return DIM, cell.bold
    if len(name) == 6 and name not in COLOURS:
        return f"#{name}", cell.bold
    return COLOURS.get(name, FOREGROUND), cell.bold


def animated(frames: list[tuple[float, Frame]]) -> str:
    """The frames as one SVG. Each line that occurs is defined once."""
    total = frames[-1][0] + LAST_SECONDS
    names: dict[str, str] = {}
    shown = []
    for number, (at, frame) in enumerate(frames):
        until = frames[number + 1][0] if number + 1 < len(frames) else total
        uses = []
        for row, line in enumerate(frame):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * LINE_HEIGHT}"/>')
        times = f"0;{at / total:.5f};{min(until / total, 0.99999):.5f};1"
        shown.append(
            f'<g visibility="hidden">{"".join(uses)}'
            f'<animate attributeName="visibility" dur="{total:.2f}s" repeatCount="indefinite" '
            f'calcMode="discrete" keyTimes="{times}" values="hidden;visible;hidden;hidden"/></g>'
        )
    width = COLUMNS * CELL_WIDTH + 2 * MARGIN
    height = ROWS * LINE_HEIGHT + 2 * MARGIN
    lines = "".join(
        f'<text id="{name}" y="{MARGIN + 0.75 * LINE_HEIGHT}">{line}</text>'
        for line, name in names.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">'
        "<title>omlx-worker demo</title>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        '<g font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="14"><defs>{lines}</defs>{"".join(shown)}</g></svg>\n'
    )


def main() -> None:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/demo.svg")
    frames = record([sys.executable, "-c", "from omlx_worker.cli import main; main()", "demo"])
    output.write_text(animated(frames))
    print(f"{output}: {len(frames)} frames, {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
