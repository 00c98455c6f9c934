"""A server for webhooks: remembers requests and, if told to, answers late or leads elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebhookServer(ThreadingHTTPServer):
    """
    Attributes:
        requests: method, path and body of each request.
        answers: cleared while requests wait for their answers.
        hung_up: whether a client left before its answer.
        location: where answers redirect to.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, bytes]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.hung_up = False
        self.location = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: WebhookServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, body))
        self.server.answers.wait(30)
        try:
            self.send_response(302 if self.server.location else 200)
            self.send_header("Location", self.server.location)
            self.end_headers()
        except OSError:
            self.server.hung_up = True

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def webhook_server() -> Iterator[WebhookServer]:
    with WebhookServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            server.shutdown()
            thread.join()
