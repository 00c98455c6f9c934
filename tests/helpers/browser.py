"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Page:
    """A tab.

    Attributes:
        said: what the page wrote to its console, exceptions included.
    """

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._count = 0
        self._session = ""
        self._loaded = False
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        read: dict[str, Any] = json.loads(found)
        method = read.get("method")
        self._loaded |= method == "Page.loadEventFired"
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(read["params"]))
        return read

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._read()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """The text that an element shows; empty before it is there."""
        return str(
            self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, width: int, height: int) -> None:
        size: dict[str, Any] = {"width": width, "height": height}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )


@contextlib.contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """A tab of a new browser, which ends with the block.

    Args:
        folder: for the browser's own files.
    """
    assert CHROMIUM
    here_reads, there_writes = os.pipe()
    there_reads, here_writes = os.pipe()
    # The protocol is on 3 and 4.
    line = f'exec "$0" "$@" 3<&{there_reads} 4>&{there_writes}'
    process = subprocess.Popen(
        ["bash", "-c", line, CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(there_reads, there_writes),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(there_reads)
    os.close(there_writes)
    with open(here_writes, "wb") as commands, open(here_reads, "rb") as answers:
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
            process.wait(20)
