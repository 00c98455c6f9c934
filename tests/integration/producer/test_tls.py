"""A TLS handshake that fails is told with its own remedy."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from omlx_producer import connection
from omlx_producer.cli.main import cli
from omlx_worker import cli as worker_cli

CERTIFICATE = Path(__file__).parents[2] / "helpers" / "localhost.pem"
"""Of localhost, signed by itself, with its key."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RETRIES", 0)


@contextmanager
def tls_server(*, asks: bool = False) -> Iterator[int]:
    """The port of a server that makes TLS handshakes and says nothing.

    Args:
        asks: for a certificate of the client.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(CERTIFICATE)
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            try:
                context.wrap_socket(client, server_side=True).recv(1)
            except OSError:
                pass
            finally:
                client.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis://localhost:{}/0", "if it speaks TLS, give rediss:// in place of redis://"),
        ("rediss://localhost:{}/0", "name the file of its authority in the URL, with ?ssl_ca"),
        (f"rediss://127.0.0.1:{{}}/0?ssl_ca_certs={CERTIFICATE}", "name the host in the URL as"),
        ("rediss://localhost:{}/0?ssl_ca_certs=/nowhere.pem", "a file that the URL names for TLS"),
        (
            f"rediss://localhost:{{}}/0?ssl_ca_certs={CERTIFICATE}",
            "it asks for a certificate, name",
        ),
    ],
)
def test_what_a_handshake_lacks_is_told(url: str, remedy: str) -> None:
    with tls_server(asks="asks" in remedy) as port:
        done = CliRunner().invoke(cli, ["models", "--redis-url", url.format(port)])
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    assert remedy in done.stderr
    assert "start a server" not in done.stderr


def test_a_server_that_speaks_no_tls_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"rediss://127.0.0.1:{silent.getsockname()[1]}/0?socket_timeout=0.1"
        done = CliRunner().invoke(cli, ["models", "--redis-url", url])
    assert done.exit_code == 3
    assert "if it speaks none, give redis:// in place of rediss://" in done.stderr


def test_a_worker_tells_it_too() -> None:
    with tls_server() as port:
        url = f"rediss://localhost:{port}/0"
        done = CliRunner().invoke(worker_cli.main, ["run", "-m", "demo", "--redis-url", url])
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    assert "has a certificate that is not trusted here" in done.stderr
