"""Sentences for errors of Redis: what the server means, and the remedy."""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from omlx_producer.connection import redis_variable, without_password
from omlx_producer.environment import DOTENV, PREFIX
from omlx_producer.errors import InvalidRequest, one_line
from omlx_producer.program import is_given

# redis-py puts it behind the command of a pipeline, and before the error. The command is free text.
_PIPELINE = "of pipeline caused error: "
# What servers say that does not tell its cause: the beginning, what it means, and the remedy.
_COMPLAINTS = (
    (
        ("HELLO must be called", "Authentication required"),
        "asks for a password",
        "give it in the URL, as in redis://:PASSWORD@host:6379/0",
    ),
    (
        ("DB index is out of range", "invalid DB index"),
        "has no database of this number",
        "end the URL in a smaller one, as in /0",
    ),
    (
        ("unknown command 'HELLO'", "unknown command `HELLO`"),
        "is too old for jobs",
        "upgrade it to Redis 7.2 or newer, or Valkey, or give the URL of another one",
    ),
    (
        ("NOPROTO",),
        "does not speak the protocol that is asked for",
        "add ?protocol=2 to the URL",
    ),
    (
        ("max number of clients",),
        "has as many clients as it takes",
        "end some of them, or raise its maxclients",
    ),
)
_ELSEWHERE = f"name another with --redis-url or {PREFIX}REDIS_URL"
# The first that fits counts: an AuthenticationError is a ConnectionError too.
_REASONS: tuple[tuple[tuple[type[RedisError], ...], str], ...] = (
    (
        (AuthenticationError,),
        "refuses the user or password ({error}); correct them in the URL",
    ),
    (
        (NoPermissionError,),
        "denies this user a right ({error}); grant it with ACL SETUSER, for all keys and channels "
        "that match rq:* and omlx:*",
    ),
    (
        (AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError),
        "is part of a Redis Cluster, which is not supported; {elsewhere}",
    ),
    ((InvalidResponse,), "is not a Redis server ({error}); {elsewhere}"),
    ((BusyLoadingError,), "is still loading its data; try again"),
    (
        (ConnectionError, TimeoutError),
        "does not answer ({error}); start a server there, or {elsewhere}",
    ),
    ((RedisError,), "refuses: {error}"),
)
_SENTINEL = (
    "lacks a command that jobs need ({error}); if it is a Redis Sentinel, give the URL of the "
    "master that it watches"
)
_CLOSED = ("reset by peer", "Connection closed by server")
_WANTS_TLS = (
    "closes the connection ({error}); if it speaks TLS, give rediss:// in place of redis://"
)
_NO_FILE = "cannot be reached ({error}); a file that the URL names for TLS does not exist"
_SPEAKS_NO_TLS = (
    "does not answer in TLS ({error}); if it speaks none, give redis:// in place of rediss://"
)
# What errors of a TLS handshake say. The first that fits counts.
_TLS = (
    (
        "mismatch, certificate is not valid",
        "has a certificate for another host ({error}); name the host in the URL as it does",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "has a certificate that is not trusted here ({error}); name the file of its authority in "
        "the URL, with ?ssl_ca_certs=FILE",
    ),
    ("handshake operation timed out", _SPEAKS_NO_TLS),
    ("WRONG_VERSION_NUMBER", _SPEAKS_NO_TLS),
    ("RECORD_LAYER_FAILURE", _SPEAKS_NO_TLS),
    (
        "_ssl.c",
        "breaks TLS off ({error}); if it asks for a certificate, name yours in the URL, with "
        "?ssl_certfile=FILE&ssl_keyfile=FILE",
    ),
)


def said(error: Exception) -> str:
    """What the server said, without the command of a pipeline."""
    return str(error).rpartition(_PIPELINE)[2]


def complaint(error: Exception) -> tuple[str, str] | None:
    """What a server means by an error, and the remedy; None if the error says it itself."""
    text = said(error)
    found = (entry[1:] for entry in _COMPLAINTS if text.startswith(entry[0]))
    return next(found, None)


def cause(error: Exception) -> str:
    """Why a call to Redis failed, in one line."""
    meant = complaint(error)
    return f"it {meant[0]}" if meant else one_line(said(error))


def waiting_text(error: Exception) -> str:
    """What a command says while it waits for Redis."""
    return f"Redis is unavailable ({cause(error)}); waiting for it"


def settings_error(error: InvalidRequest, env_file: str | None = DOTENV) -> str:
    """What is wrong with the URL of ``--redis-url``, or with a variable, as a command says it."""
    if error.field != "connection":
        return str(error)
    variable = None if is_given("redis_url") else redis_variable(env_file)
    return error.told(variable or "--redis-url")


def redis_error(error: RedisError, url: str, elsewhere: str = _ELSEWHERE) -> str:
    """A sentence that names the server, its error and the remedy.

    Args:
        elsewhere: how to use another server.
    """
    if meant := complaint(error):
        reason = "; ".join(meant)
    elif "unknown command" in said(error):
        reason = _SENTINEL
    else:
        reason = tls_problem(error, url) or next(
            text for classes, text in _REASONS if isinstance(error, classes)
        )
    told = reason.format(error=one_line(said(error)), elsewhere=elsewhere)
    return f"Redis at {without_password(url)} {told}"


def tls_problem(error: RedisError, url: str) -> str | None:
    """What an error says about TLS in the URL, for `redis_error`; None if it says nothing."""
    cause = error.__context__
    text = f"{said(error)} {cause}"
    if url.startswith("redis:"):
        closed = any(part in text for part in _CLOSED)
        return _WANTS_TLS if closed else None
    if not url.startswith("rediss:"):
        return None
    if isinstance(cause, FileNotFoundError):
        return _NO_FILE
    return next((reason for part, reason in _TLS if part in text), None)
