"""A server with the routes of the Hugging Face hub, for the folders that a test gives it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """
    Attributes:
        repositories: the folder of each repository, by its name ``org/name``.
        requests: how many there were.
        served: the files whose contents were asked for, and from which byte.
        cut: of files, how many requests fail: the first is sent halfway, the next are refused.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Path] = {}
        self.requests = 0
        self.served: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def weights_served(self) -> list[str]:
        return [name for name, _ in self.served if name.endswith(".safetensors")]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        parts = parts[2:] if parts[:2] == ["api", "models"] else parts
        folder = self.server.repositories.get("/".join(parts[:2]))
        if folder is None:
            self._refuse(404, "RepoNotFound")
        elif parts[2:3] == ["resolve"]:
            self._send_file(folder, "/".join(parts[4:]))
        elif parts[2:3] == ["tree"]:
            names = sorted(path.name for path in folder.iterdir())
            self._send_json([_entry(folder / name) for name in names])
        else:
            name = "/".join(parts[:2])
            self._send_json({"id": name, "sha": _commit(folder), "siblings": []})

    do_HEAD = do_GET

    def _send_file(self, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        fails = False
        if self.command == "GET":
            self.server.served.append((name, start))
            fails = self.server.cut.get(name, 0) > 0
            self.server.cut[name] = self.server.cut.get(name, 0) - 1
            if start and fails:
                self._refuse(503, "")
                return
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", _commit(folder))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start : len(data) // 2 if fails else None])

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, error: str) -> None:
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _commit(folder: Path) -> str:
    """Changes with the files' names and sizes."""
    listed = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    return hashlib.sha1(repr(listed).encode()).hexdigest()


def _entry(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    size, oid = len(data), hashlib.sha256(data).hexdigest()
    lfs = {"lfs": {"size": size, "oid": oid, "pointerSize": 130}}
    entry = {"type": "file", "path": path.name, "size": size, "oid": oid[:40]}
    return entry | (lfs if path.suffix == ".safetensors" else {})


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
