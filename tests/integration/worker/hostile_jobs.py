"""Jobs that nobody should have written: a few hundred payloads and job hashes, each by name."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omlx_producer.wire import JOB_FUNCTION, GenerationRequest, InvalidRequest

GOOD = {"model": "fake", "prompt": "x"}
MEGABYTE = 2**20


@dataclass(frozen=True)
class Hostile:
    """A job hash: its payload, None for none at all, and its other fields."""

    name: str
    data: bytes | None
    fields: dict[str, Any] = field(default_factory=dict)


def compressed(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"))


def call(request: str, function: str = JOB_FUNCTION) -> bytes:
    return compressed(f'["{function}", null, [], {{"request": {request}}}]')


def request(**fields: Any) -> bytes:
    return call(json.dumps({**GOOD, **fields}))


def hostile_jobs(trap: Path) -> list[Hostile]:
    """All of them; ``trap`` is a file that unpickling would make."""
    jobs = [
        *_pickles(trap),
        *_not_json(),
        *_other_calls(),
        *_wrong_fields(),
        *_odd_numbers_and_texts(),
        *_deep(),
        *_hashes(),
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    return jobs


def huge_jobs() -> list[Hostile]:
    """Those that take hundreds of megabytes to look at."""
    fifty = "x" * (50 * MEGABYTE)
    return [
        Hostile("prompt-of-50-MB", call(f'{{"model": "fake", "prompt": "{fifty}"}}')),
        Hostile("prompt-of-50-MB-raw", f'["{JOB_FUNCTION}", null, [], "{fifty}"]'.encode()),
        Hostile("payload-of-70-MB", os.urandom(70 * MEGABYTE)),
        Hostile("unpacks-to-a-gigabyte", zlib.compress(bytes(1024 * MEGABYTE))),
        Hostile("five-million-lists", call("[" + "[]," * 5_000_000 + "[]]")),
        Hostile("a-million-fields", call(json.dumps({f"f{n}": n for n in range(1_000_000)}))),
        Hostile(
            "ten-megabytes-of-function", compressed(json.dumps(["f" * 10 * MEGABYTE, 0, 0, 0]))
        ),
        Hostile("a-million-stops", request(stop=["x"] * 1_000_000)),
    ]


def _pickles(trap: Path) -> Iterator[Hostile]:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (trap,))

    calls = {"trap": (Trap(), None, (), {}), "call": (JOB_FUNCTION, None, (), {"request": GOOD})}
    for name, content in calls.items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(content, protocol)
            yield Hostile(f"pickle-{name}-{protocol}", data)
            yield Hostile(f"pickle-{name}-{protocol}-compressed", zlib.compress(data))


def _not_json() -> Iterator[Hostile]:
    good = json.dumps([JOB_FUNCTION, None, [], {"request": GOOD}])
    texts = {
        "word": "hello",
        "blank": " \n\t ",
        "comment": f"/* */ {good}",
        "single-quotes": good.replace('"', "'"),
        "trailing": good + good,
        "trailing-comma": good[:-1] + ",]",
        "python": "__import__('os').system('true')",
        "control-characters": "\x00\x01\x1b[2J\x7f",
        "xml": "<?xml version='1.0'?><a/>",
    }
    for name, text in texts.items():
        yield Hostile(f"text-{name}", compressed(text))
    for cut in range(1, len(good), 7):
        yield Hostile(f"cut-{cut}", compressed(good[:cut]))
    raw = {
        "empty": b"",
        "nul": b"\x00",
        "bytes": b"\xff\x00\x01",
        "bom-16": good.encode("utf-16") + b"\xff",
        "latin": '["é"'.encode("latin-1"),
        "half-zlib": zlib.compress(good.encode())[:-9],
        "gzip": b"\x1f\x8b\x08\x00junk",
    }
    for name, data in raw.items():
        yield Hostile(f"raw-{name}", data)


def _other_calls() -> Iterator[Hostile]:
    functions = [
        "os.system", "builtins.eval", "subprocess.call", "", " ", "..", "a" * 5000, "\x00", "\n\n",
        "omlx_worker.jobs.generate ", "omlx_worker.jobs", "omlx_worker.jobs.decode_request",
        "\ud800", None, 5, True, [], {}, [JOB_FUNCTION],
    ]  # fmt: skip
    for n, function in enumerate(functions):
        body = json.dumps([function, None, [], {"request": GOOD}])
        yield Hostile(f"function-{n}", compressed(body))
    calls: list[Any] = [
        None, True, 3, "x", {}, [], [[]], [JOB_FUNCTION], [JOB_FUNCTION, None, []],
        [JOB_FUNCTION, None, [], {}, 1], [JOB_FUNCTION, "instance", [], {"request": GOOD}],
        [JOB_FUNCTION, 0, [], {"request": GOOD}], [JOB_FUNCTION, None, [GOOD], {}],
        [JOB_FUNCTION, None, {}, {"request": GOOD}], [JOB_FUNCTION, None, None, {"request": GOOD}],
        [JOB_FUNCTION, None, [], []], [JOB_FUNCTION, None, [], None], [JOB_FUNCTION, None, [], {}],
        [JOB_FUNCTION, None, [], {"request": GOOD, "other": 1}],
        [JOB_FUNCTION, None, [], {"Request": GOOD}], [JOB_FUNCTION, None, [], {"self": GOOD}],
    ]  # fmt: skip
    for n, content in enumerate(calls):
        yield Hostile(f"call-{n}", compressed(json.dumps(content)))
    for n, content in enumerate([None, True, 3, "x", [], [GOOD], {}, {"": 1}]):
        yield Hostile(f"request-{n}", call(json.dumps(content)))


def _wrong_fields() -> Iterator[Hostile]:
    """Every field with every value that the request itself refuses."""
    values: list[Any] = [
        "x" * 300, "", -1, 1e308, 10**30, [], {}, [None], [[["deep"]]], True, {"a": {"b": 1}},
        "\x00",
    ]  # fmt: skip
    for name in (*GenerationRequest.model_fields, "max_tokens", "colour", "__class__", "\ud800"):
        for n, value in enumerate(values):
            fields = {**GOOD, name: value}
            try:
                GenerationRequest.parse(fields)
            except InvalidRequest:
                yield Hostile(
                    f"field-{name.encode('ascii', 'replace').decode().strip('?')}-{n}",
                    call(json.dumps(fields)),
                )


def _odd_numbers_and_texts() -> Iterator[Hostile]:
    numbers = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000, "-" + "9" * 4000]
    for field_name in ("temperature", "seed", "max_completion_tokens"):
        for n, number in enumerate(numbers):
            body = f'{{"model": "fake", "prompt": "x", "{field_name}": {number}}}'
            yield Hostile(f"number-{field_name}-{n}", call(body))
    yield Hostile("surrogate-prompt", request(prompt="\ud800"))
    yield Hostile("surrogate-stop", request(stop=["\udfff"]))
    yield Hostile("surrogate-model", request(model="\ud800"))
    yield Hostile("other-model", request(model="other"))
    yield Hostile("no-prompt", call('{"model": "fake"}'))
    yield Hostile("empty-prompt", request(prompt=""))
    yield Hostile("two-prompts", request(messages=[{"role": "user", "content": "x"}]))
    yield Hostile("too-long-for-the-context", request(prompt="x" * 20_000))
    yield Hostile("token-ids-out-of-range", request(prompt=[2**40, -5]))
    yield Hostile("bias-of-no-token", request(logit_bias={"-1": 3, "\x1b": 3}))


def _deep() -> Iterator[Hostile]:
    for depth in (500, 10_000, 1_000_000):
        lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
        yield Hostile(f"deep-lists-{depth}", compressed(lists))
        yield Hostile(f"deep-objects-{depth}", compressed(objects))
        yield Hostile(f"deep-request-{depth}", call(lists))
        yield Hostile(f"deep-prompt-{depth}", call(f'{{"model": "fake", "prompt": {lists}}}'))
        fields = f'"model": "fake", "prompt": 3, "chat_template_kwargs": {{"a": {objects}}}'
        yield Hostile(f"deep-template-{depth}", call(f"{{{fields}}}"))


def _hashes() -> Iterator[Hostile]:
    """Job hashes that RQ itself can not read, around a payload that is no good either."""
    bad = request(n="two")
    yield Hostile("no-data", None)
    yield Hostile("no-data-but-callbacks", None, {"failure_callback_name": "no.such"})
    fields: dict[str, Any] = {
        "status": "bogus", "created_at": "yesterday", "enqueued_at": "\xff", "origin": b"\xff\xfe",
        "timeout": "soon", "result_ttl": "1e999", "failure_ttl": "-", "ttl": "never",
        "retries_left": "many", "retry_intervals": "{", "repeats_left": "x", "webhooks": "{",
        "success_callback_name": b"\xff", "failure_callback_name": "no.such.module",
        "stopped_callback_name": "os.abort", "failure_callback_timeout": "x", "meta": b"\x80\x04.",
        "dependency_ids": "{", "group_id": b"\xff", "omlx_deaths": "nan", "omlx_streamed": "x" * 9,
        "worker_name": "x" * 100_000, "number_of_retries": "x", "enqueue_at_front": "x",
    }  # fmt: skip
    for name, value in fields.items():
        yield Hostile(f"hash-{name}", bad, {name: value})
        others = {"failure_callback_name": "no.such.module", name: value}
        yield Hostile(f"hash-{name}-for-rq", bad, others)
