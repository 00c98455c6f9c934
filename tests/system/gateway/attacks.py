"""Requests that nobody should send, by a seed: raw bytes, and how they are sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from tests.helpers.workers import ALIAS

KEY_MARK = b"@KEY@"
"""Stands for a good API key."""
BODY_LIMIT = 2**18
INJECTED = "x-injected"


class Manner(Enum):
    """How a request is sent, and its answer read."""

    WHOLE = "at once, and read to the end"
    DRIP = "in pieces, too slowly"
    STOP = "its first two thirds"
    LEAVE = "at once, and hung up soon"
    DEAF = "at once, and not read"


@dataclass(frozen=True)
class Attack:
    """Bytes for one connection."""

    data: bytes
    manner: Manner = Manner.WHOLE


def attack(random: Random) -> Attack:
    """The next request of a seed."""
    return random.choice(KINDS)(random)


def head(method: str, path: str, *headers: bytes) -> bytes:
    first = f"{method} {path} HTTP/1.1".encode()
    usual = (b"Host: localhost", b"Authorization: Bearer " + KEY_MARK, b"Connection: close")
    return b"\r\n".join((first, *usual, *headers)) + b"\r\n\r\n"


def post(path: str, body: bytes, *headers: bytes, kind: bytes = b"application/json") -> bytes:
    length = b"Content-Length: %d" % len(body)
    return head("POST", path, b"Content-Type: " + kind, length, *headers) + body


def post_chat(*headers: bytes, **fields: Any) -> bytes:
    return post("/v1/chat/completions", json.dumps({**CHAT, **fields}).encode(), *headers)


def post_text(fields: bytes) -> bytes:
    return post("/v1/completions", b'{"model":"fake","prompt":"x","max_tokens":4,%b}' % fields)


CHAT: dict[str, Any] = {
    "model": ALIAS,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
}
FIRST_LINES = [
    *(b"", b"\0" * 50, b"\x16\x03\x01\x02\x00\x01", b"GET", b"GET /", b"GET / HTTP/9.9"),
    *(b"PRI * HTTP/2.0", b" GET / HTTP/1.1", b"G\0T / HTTP/1.1", b"GET /\tx HTTP/1.1"),
    *(b"GET / HTTP/1.1 x", b"\xff\xfe / HTTP/1.1", b"GET /\xc3\xa4 HTTP/1.1"),
    *(b"CONNECT localhost:22 HTTP/1.1", b"GET /v1/models HTTP/1.1", b"POST /v1/files HTTP/1.1"),
]
ODD_HEADERS = [
    *(b"Host: a\r\nHost: b", b"Content-Length: -1", b"Content-Length: 1e3", b"X", b"X: a\rb"),
    *(b"Content-Length: 5\r\nContent-Length: 6", b"X : y", b": x", b"X: \0", b" folded"),
    *(b"Content-Length: " + b"9" * 5000, b"Transfer-Encoding: gzip, chunked", b"\xff: \xff"),
    *(b"Transfer-Encoding: chunked\r\nContent-Length: 4", b"Transfer-Encoding: x", b"Expect: x"),
    *(b"Upgrade: websocket\r\nConnection: upgrade", b"Expect: 100-continue"),
]


def malformed(random: Random) -> Attack:
    data = random.choice(FIRST_LINES) + b"\r\nHost: localhost\r\n" + random.choice(ODD_HEADERS)
    rest = random.choice([b"", b"0\r\n\r\n", b"zz\r\n", b"-1\r\nx\r\n", b"{}"])
    return Attack(data + b"\r\n\r\n" + rest)


def broken_chunks(random: Random) -> Attack:
    chunks = [
        *(b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"5\r\nhelloo\r\n"),
        b"0x5\r\nhello",
        *(b"5;" + b"x" * 70_000 + b"\r\nhello\r\n", b"0\r\nX: y\r\nZ\r\n\r\n", b"-5\r\nhello\r\n"),
    ]
    headers = (b"Content-Type: application/json", b"Transfer-Encoding: chunked")
    return Attack(head("POST", "/v1/completions", *headers) + random.choice(chunks))


def huge(random: Random) -> Attack:
    many, deep = 10 ** random.randint(2, 4), random.choice([50, 300, 900, 990, 5000, 50_000])
    length = (b"Content-Type: application/json", b"Content-Length: 9999999999999")
    shape = random.choice([b'{"a":', b"["])
    closing = {b"[": b"]"}.get(shape, b"}")
    data = random.choice(
        [
            head("GET", "/health", *(b"X-%d: y" % n for n in range(many))),
            head("GET", "/health", b"X: " + b"x" * random.choice([60_000, 66_000, 300_000])),
            head("GET", "/" + "x" * random.choice([1000, 60_000, 70_000])),
            head("GET", "/v1/files?after=" + "x" * 50_000),
            head("POST", "/v1/completions", *length),
            post("/v1/completions", b"x" * (BODY_LIMIT + 2**16)),
            post("/v1/batches", shape * deep),
            post("/v1/chat/completions", shape * deep + b"1" + closing * deep),
            post_text(b'"metadata":' + shape * deep + b"1" + closing * deep),
            post_text(b'"seed":' + b"9" * many),
            post_text(b'"temperature":1e' + b"9" * 50),
            post_text(json.dumps({f"f{n}": n for n in range(many)}).encode()[1:-1]),
            post_chat(stop=["x"] * many),
            post_chat(model="m" * many),
        ]
    )
    return Attack(data)


def slow(random: Random) -> Attack:
    data = random.choice([post_chat(), head("GET", "/v1/models"), upload(random)])
    return Attack(data, random.choice([Manner.DRIP, Manner.STOP]))


def deaf(random: Random) -> Attack:
    length, choices = random.choice([50, 500]), random.choice([1, 8])
    return Attack(post_chat(stream=True, max_tokens=length, n=choices), Manner.DEAF)


def without_right(random: Random) -> Attack:
    given = [
        *(b"", b"Bearer", b"Bearer ", b"Bearer x", b"Basic " + KEY_MARK, b"bearer\t" + KEY_MARK),
        *(b"Bearer " + KEY_MARK[:-1] + b"\xff", b"Bearer " + b"k" * 60_000, KEY_MARK * 2),
    ]
    button = random.choice(["pause/fake", "resume/fake", "cancel/batch-0123456789ab"])
    pressed = post(f"/status/{button}", b"", b"X-Omlx-Page: 1")
    data = random.choice([post_chat(), upload(random), head("GET", "/status"), pressed])
    return Attack(data.replace(b"Bearer " + KEY_MARK, random.choice(given), 1))


def path(random: Random) -> Attack:
    up = random.choice(["../", "..%2f", "%2e%2e/", "%252e%252e%252f", "..\\", "..%5c", "....//"])
    zeros = "0" * 24
    name = random.choice(
        [
            *(up * random.randint(1, 6) + "secret", up * 6 + "etc/passwd", "%00", "%ff%fe", "*"),
            *(f"file-{zeros}", f"file-{zeros}%00", f"file-{zeros}%0a", "~root", ".", "a?b#c"),
            *("file-" + "A" * 24, f"batch_{zeros}", "omlx:files", "%2fetc%2fpasswd", "/" * 9),
        ]
    )
    where = random.choice(
        [
            *(f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/models/{name}"),
            *(f"/v1/batches/{name}", f"/v1/batches/{name}/cancel", f"/status/cancel/{name}"),
            *(f"/{name}", f"//{name}", f"/v1/files?limit={name}", "http://evil.example/v1/models"),
            f"/v1/files?after={name}&order={name}",
        ]
    )
    method = random.choice(["GET", "DELETE", "POST", "HEAD", "PUT", "OPTIONS", "TRACE"])
    return Attack(head(method, where, b"Content-Length: 0"))


NAMES = [
    *(b"Idempotency-Key", b"Last-Event-ID", b"X-Omlx-Priority", b"X-Omlx-Detach", b"X-Omlx-Page"),
    *(b"Content-Type", b"Accept", b"Cookie", b"Origin", b"Range", b"Host"),
]
VALUES = [
    *(b"a\r\nX-Injected: 1", b"a\rX-Injected: 1", b"a\nX-Injected: 1", b"a\r\n X-Injected: 1"),
    *(b"%0d%0aX-Injected:%201", b"\xe5\x98\x8a\xe5\x98\x8dX-Injected: 1", b"\x7f\x1b[31m", b""),
    *(b"\xff" * 50, b"x" * 5000, b"../../secret", b"rq:job:1", b"*", b"a:0", b"a:-1"),
    *(b"0" * 36 + b":99999999999999999999", b"high,high", b"bytes=0-,0-,0-"),
]


def headers(random: Random) -> Attack:
    header = random.choice(NAMES) + b": " + random.choice(VALUES)
    return Attack(post_chat(header, stream=random.random() < 0.5))


def upload(random: Random, text: bytes = b"{}\n") -> bytes:
    names = [b"a.jsonl", b"../../secret", b"a\0b", b"\xff", b"", b"a" * 5000, b"/etc/passwd"]
    part = b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    file = b'file"; filename="' + random.choice(names)
    body = part % (b"purpose", b"batch") + part % (file, text) + b"--B--\r\n"
    return post("/v1/files", body, kind=b"multipart/form-data; boundary=B")


def broken_upload(random: Random) -> Attack:
    changes: list[tuple[bytes, list[bytes]]] = [
        (b"boundary=B", [b"boundary=C", b"boundary=", b"x", b"boundary=" + b"b" * 300]),
        (b"\r\n--B--\r\n", [b"", b"\r\n--B", b"--B--\r\n"]),
        (b'name="file"', [b'name="purpose"', b'name=""', b"name=file", b'name="x"']),
        (b"\r\nbatch", [b"\r\nfine-tune", b"\r\n", b"\r\n\xff\xfe", b"\r\n" + b"b" * 2**20]),
        (b"Content-Disposition", [b"X" * 9000, b"Content-Type", b"\0"]),
        (b"--B\r\nContent", [b"--B\r\n" * 300 + b"Content"]),
        (b"multipart/form-data", [b"multipart/mixed", b"application/json", b"\xff"]),
    ]
    old, new = random.choice(changes)
    good = upload(random, b"x" * random.choice([0, 10, 50_000]))
    first, _, body = good.replace(old, random.choice(new), 1).partition(b"\r\n\r\n")
    lines = [line for line in first.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return Attack(b"\r\n".join((*lines, b"Content-Length: %d\r\n\r\n" % len(body))) + body)


ODD: list[Any] = [
    *("", "\0", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "e\u0301" * 300),
    "\U0001f469\u200d" * 50,
    *("\x1b[2J", "a\r\nb", "\u2028", "\ufdfa" * 500, "\U0010ffff", "'; FLUSHALL\r\n", "{{7*7}}"),
    *("x" * 9000, None, True, False, 0, -1, 1.5, 2**31, 2**63, -(10**40), 1e308, float("nan")),
    *(float("inf"), [], {}, [[]], [None], {"": ""}, {"type": "object"}, {"a": {"b": [{}]}}),
    [0] * 3000,
]
FIELDS = [
    *("model", "messages", "prompt", "n", "stop", "seed", "temperature", "top_p", "logit_bias"),
    *("stream", "stream_options", "response_format", "tools", "tool_choice", "user", "metadata"),
    *("max_tokens", "completion_window", "cache_salt", "logprobs", "functions", "__proto__"),
    *("input_file_id", "endpoint"),
]


def odd_fields(random: Random) -> Attack:
    where = random.choice(["chat/completions", "completions", "batches"])
    body = dict(CHAT) if where[:2] == "ch" else {"model": ALIAS, "prompt": "x", "max_tokens": 4}
    for _ in range(random.randint(1, 3)):
        odd = random.choice(ODD)
        if random.random() < 0.2:
            role, said = random.choice(["user", "tool", odd]), random.choice([odd, [odd]])
            body["messages"] = [{"role": role, "content": said}]
        else:
            body[random.choice(FIELDS)] = random.choice([odd, odd, [odd], {"x": odd}])
    return Attack(post(f"/v1/{where}", json.dumps(body).encode()))


def encoded(random: Random) -> Attack:
    """A body in another encoding, or of another type than it claims."""
    body = json.dumps(CHAT)
    bodies = [body.encode("utf-16"), body.encode("utf-32-be"), body.encode()[:-1] + b"\xff}"]
    kinds = [b"application/json", b"application/json; charset=utf-7", b"text/plain", b""]
    data = random.choice(bodies)
    return Attack(post("/v1/chat/completions", data, kind=random.choice(kinds)))


def hang_up(random: Random) -> Attack:
    """While the job is queued or streams, or the upload is read."""
    header = random.choice([b"X: y", b"Idempotency-Key: %d" % random.randrange(9)])
    header = random.choice([header, b"X-Omlx-Detach: true"])
    length, streams = random.choice([1, 50, 500]), random.random() < 0.5
    chat = post_chat(header, stream=streams, max_tokens=length)
    data = random.choice([chat, upload(random, b"x" * 99_999)])
    return Attack(data, random.choice([Manner.LEAVE, Manner.STOP]))


def mutated(random: Random) -> Attack:
    """A good request with bytes changed, removed, inserted and doubled."""
    good = [post_chat(), post_chat(stream=True), upload(random), head("GET", "/v1/models")]
    data = bytearray(random.choice(good))
    for _ in range(random.randint(1, 6)):
        at, count = random.randrange(len(data)), random.randint(1, 8)
        changes = [random.randbytes(1), b"", random.randbytes(count), data[at : at + 8 * count] * 2]
        data[at : at + random.choice([0, 1, count])] = random.choice(changes)
    return Attack(bytes(data))


KINDS: list[Callable[[Random], Attack]] = [
    *(malformed, broken_chunks, huge, without_right, path, headers, broken_upload, encoded),
    *(odd_fields, odd_fields, mutated, mutated, hang_up, slow, deaf),
]
