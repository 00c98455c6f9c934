"""omlx-submit as a process: exit codes, signals, and pipes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import redis

from omlx_producer import Producer
from omlx_worker.queue.embedded import free_port
from tests.helpers.fake_worker import FakeWorker, announce

# A shell that runs the tests in the background has its children ignore interrupts.
CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from omlx_producer.cli.main import main; main()"
)


def environment(redis_url: str) -> dict[str, str]:
    return {
        "PYTHONPATH": ":".join(path for path in sys.path if path),
        "OMLX_QUEUE_REDIS_URL": redis_url,
        "TERM": "xterm",
    }


def spawn(redis_url: str, *args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *args],
        env=environment(redis_url),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("served", "producer")
def test_the_process_exits_with_0_when_done(redis_url: str) -> None:
    process = spawn(redis_url, "x")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "hello 0, wörld\n")
    assert err.startswith("job ")
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("producer")
def test_the_process_exits_with_1_when_the_job_fails(
    redis_url: str, served: dict[str, Any]
) -> None:
    served["error"] = "out of memory"
    process = spawn(redis_url, "x")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert "out of memory" in err


@pytest.mark.usefixtures("producer")
def test_the_process_exits_with_2_for_a_bad_request(redis_url: str) -> None:
    process = spawn(redis_url, "")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert err == "omlx-submit: PROMPT: is empty; give text\n"


def test_the_process_exits_with_3_without_redis() -> None:
    process = spawn(f"redis://127.0.0.1:{free_port()}", "x")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (3, "")
    assert "does not answer" in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_an_interrupted_process_exits_with_130_and_the_job_goes_on(
    redis_url: str, connection: redis.Redis, options: list[str]
) -> None:
    process = spawn(redis_url, *options, "x")
    assert process.stderr is not None
    job_id = process.stderr.readline().split()[1]
    worker = FakeWorker(connection, job_id)
    worker.start()
    worker.step("so far")
    if not options:
        assert process.stdout is not None
        assert process.stdout.read(6) == "so far"
    else:
        time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"\nthe job goes on; watch it again with: omlx-submit watch {job_id}\n"
    assert worker.job.get_status() == "started"


@pytest.mark.usefixtures("producer")
def test_a_reader_that_leaves_ends_the_process_quietly(
    redis_url: str, connection: redis.Redis
) -> None:
    process = spawn(redis_url, "x")
    assert process.stderr is not None
    assert process.stdout is not None
    worker = FakeWorker(connection, process.stderr.readline().split()[1])
    worker.start()
    worker.step("first")
    assert process.stdout.read(5) == "first"
    process.stdout.close()
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        worker.step("more")
        time.sleep(0.05)
    assert process.wait(timeout=5) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("command", ["status", "cancel", "--help"])
def test_a_full_disk_is_told_in_one_sentence(
    redis_url: str, producer: Producer, command: str
) -> None:
    args = [command] if command == "--help" else [command, producer.submit(prompt="x").id]
    with open("/dev/full", "w") as full:
        process = spawn(redis_url, *args, stdout=full.fileno())
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.endswith(": the output: No space left on device\n")
    assert len(err.splitlines()) == 1


def test_a_closed_stdin_is_no_prompt(redis_url: str) -> None:
    process = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-c", CODE, "-"],
        env=environment(redis_url),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "omlx-submit: stdin: is closed; give PROMPT, or pipe it into the command\n"
    )


def test_the_first_text_does_not_wait_for_the_last(redis_url: str, connection: redis.Redis) -> None:
    announce(connection)
    process = spawn(redis_url, "x")
    assert process.stderr is not None
    assert process.stdout is not None
    worker = FakeWorker(connection, process.stderr.readline().split()[1])
    worker.start()
    for text in ("a", "b", "c"):
        worker.step(text)
        assert os.read(process.stdout.fileno(), 10) == text.encode()
    worker.finish()
    assert process.communicate(timeout=30)[0] == "\n"


def test_a_watch_of_the_workers_ends_quietly_with_130(
    redis_url: str, connection: redis.Redis
) -> None:
    announce(connection)
    process = spawn(redis_url, "status", "--watch", "0.1", "--json")
    assert process.stdout is not None
    for _ in range(2):
        assert json.loads(process.stdout.readline())["models"][0]["alias"] == "demo"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_a_watch_whose_reader_leaves_ends_quietly_with_141(
    redis_url: str, connection: redis.Redis
) -> None:
    announce(connection)
    process = spawn(redis_url, "status", "--watch", "0.1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_terminal_gets_a_view_that_is_redrawn_and_no_foreign_commands(
    redis_url: str, connection: redis.Redis
) -> None:
    announce(connection, "bad[/nope]\x07")
    primary, secondary = pty.openpty()
    process = spawn(redis_url, "status", "--watch", "0.1", stdout=secondary)
    os.close(secondary)
    shown = b""
    while shown.count(b"no worker serves") < 2:
        shown += os.read(primary, 1000)
    assert b"\x1b[2K" in shown
    assert b"bad[/nope]\\x07" in shown
    assert b"\x07" not in shown
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while os.read(primary, 1000):
            pass
    assert process.wait(timeout=30) == 130
    os.close(primary)
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
