"""Take the pictures of the gateway's page for docs/http.md, light and dark.

Usage: python -m scripts.record_page [FOLDER]. Needs the extras worker and dev, and Chromium. What
they show is real: the demo model works through batches, and answers a prompt of the page. It always
drafts, so that the picture has marks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redis import Redis

from tests.helpers.browser import browser_page
from tests.helpers.bulk_runs import upload
from tests.helpers.gateway import running_gateway
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

WORKER = "from omlx_worker.cli import main; main()"
PROMPT = "def reverse(items):"
WATCHED_SECONDS = 80
WIDTH, HEIGHT = 960, 1240


def record(folder: Path) -> None:
    with redis_server() as server, tempfile.TemporaryDirectory() as home:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-c", WORKER, "run", "-m", "demo", "--redis-url", server.url),
                *("--state-dir", f"{home}/state", "--name", "mac-1", "--mode", "mtp"),
            ]
        )
        try:
            _take(server.url, Path(home), folder)
        finally:
            worker.terminate()
            worker.wait(60)


def _take(url: str, home: Path, folder: Path) -> None:
    with (
        Redis.from_url(url) as connection,
        running_gateway(url) as gateway,
        browser_page(home / "browser") as page,
    ):
        wait_for(lambda: connection.exists("omlx:models"), 120)
        page.open(gateway)
        time.sleep(6)
        ask = {"prompt": PROMPT, "max_tokens": 100}
        first = upload(connection, 32, **ask)
        wait_for(lambda: first.read().over, 300)
        time.sleep(6)
        upload(connection, 400, **ask)
        waits = upload(connection, 500, "qwen", **ask)
        assert waits.read().left == 500
        time.sleep(WATCHED_SECONDS)
        page.evaluate(f"document.querySelector('#prompt').value = '{PROMPT}'")
        page.evaluate("document.querySelector('#limit').value = 60")
        page.evaluate("document.querySelector('#run').click()")
        wait_for(lambda: " tokens in " in page.text("#figures"), 120)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            picture = folder / f"page-{scheme}.png"
            page.screenshot(picture, WIDTH, HEIGHT)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    record(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
