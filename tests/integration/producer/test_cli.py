"""omlx-submit: data on stdout, the rest on stderr, and an exit code for every end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from click.testing import CliRunner, Result

from omlx_producer import JobHandle, Producer
from omlx_producer.cli.main import cli
from omlx_producer.schemas import short_schema
from omlx_producer.wire import parse_event
from omlx_worker.queue.embedded import free_port
from tests.helpers.fake_worker import FakeWorker, announce, sign_on
from tests.helpers.markups import between
from tests.helpers.redis_server import RedisServer, redis_server

Run = Callable[..., Result]


@pytest.fixture
def run(redis_url: str, producer: Producer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Invokes omlx-submit against the session's server, where one model is known."""
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)

    def invoke(*args: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, args, input=stdin, prog_name="omlx-submit")

    return invoke


def user_text(served: dict[str, Any]) -> str:
    """The text of the only message of the last request."""
    (message,) = served["request"]["messages"]
    assert message["role"] == "user"
    return str(message["content"])


@pytest.mark.usefixtures("served")
def test_the_text_of_a_prompt_goes_to_stdout(run: Run) -> None:
    done = run("def fibonacci(n):")
    assert (done.exit_code, done.stdout) == (0, "hello 0, wörld\n")
    assert done.stderr.startswith("job ")


def test_a_dash_reads_stdin_as_it_is(run: Run, served: dict[str, Any]) -> None:
    assert run("-", stdin="def f():\n").exit_code == 0
    assert user_text(served) == "def f():\n"


def test_an_expression_that_no_worker_would_compile_makes_no_job(
    run: Run, connection: redis.Redis
) -> None:
    pytest.importorskip("llguidance")
    refused = run("x", "--regex", "(", "--detach")
    assert refused.exit_code == 2
    assert "--regex: the regular expression cannot be compiled (uncl" in refused.stderr
    assert not connection.keys("rq:job:*")


def test_the_form_of_the_answer_is_given_by_files_and_patterns(
    run: Run, served: dict[str, Any], tmp_path: Path
) -> None:
    schema, tools = tmp_path / "schema.json", tmp_path / "tools.json"
    schema.write_text('{"type": "object"}')
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    assert run("x", "--schema", str(schema)).exit_code == 0
    named = {"name": "answer", "schema": {"type": "object"}}
    assert served["request"]["response_format"] == {"type": "json_schema", "json_schema": named}
    assert run("x", "--schema", ' {"type": "object"}').exit_code == 0
    assert served["request"]["response_format"]["json_schema"] == named
    assert run("x", "--schema", "name, year int").exit_code == 0
    assert served["request"]["response_format"]["json_schema"] == {
        "name": "answer",
        "schema": short_schema("name, year int"),
    }
    assert run("x", "--regex", "[0-9]+").exit_code == 0
    assert served["request"]["structured_outputs"] == {"regex": "[0-9]+"}
    assert run("x", "--choice", "a", "--choice", "b").exit_code == 0
    assert served["request"]["structured_outputs"] == {"choice": ["a", "b"]}
    assert run("x", "--tools", str(tools)).exit_code == 0
    assert served["request"]["tools"] == json.loads(tools.read_text())


@pytest.mark.parametrize(
    ("content", "args", "sentence"),
    [
        ("{", ("--schema",), "schema.json is not JSON"),
        ("[]", ("--schema",), "schema.json holds no object; give a JSON schema"),
        ('{"type": "objec"}', ("--schema",), "--schema: type: got 'objec'; give one of"),
        ("{}", ("--tools",), "schema.json holds no list; give a list of tools as OpenAI"),
        ("[{}]", ("--raw", "--tools"), "--tools does not go with --raw; leave one of the two out"),
        ("[{}]", ("--tools",), "tools[0].type: missing; give "),
        (
            "{}",
            ("--regex", "a", "--schema"),
            "--regex does not go with --schema; leave one of the two out",
        ),
    ],
)
def test_a_form_that_is_none_is_told_in_one_sentence(
    run: Run, tmp_path: Path, content: str, args: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "schema.json").write_text(content)
    done = run("x", *args, str(tmp_path / "schema.json"))
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("none.json", "--schema: none.json cannot be read (No such file or directory)"),
        ('{"type": ', "--schema: the schema is not JSON"),
        ("year date", "--schema: year: got 'date'; give int, float, bool, str"),
        ("x" * 300 + "/y", "--schema: got "),
    ],
)
def test_a_schema_that_is_none_is_told_in_one_sentence(run: Run, given: str, sentence: str) -> None:
    done = run("x", "--schema", given)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert done.stderr.count("\n") == 1


def test_a_result_that_is_only_calls_is_shown_as_json(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    worker.finish(body={"choices": [choice], "usage": usage})
    assert json.loads(run("result", job.id).stdout) == function


def test_a_decision_has_no_stream(run: Run, served: dict[str, Any]) -> None:
    assert run("x", "--choice", "a", "--choice", "b", "--probabilities").exit_code == 0
    assert served["request"]["probabilities"]
    assert served["request"]["stream"] is False


def test_a_decision_is_shown_with_all_probabilities_the_likeliest_first(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    shares = {"order": 0.25, "complaint": 0.75}
    choice = {"index": 0, "text": "complaint", "finish_reason": "stop", "probabilities": shares}
    worker.finish(body={"choices": [choice], "usage": usage})
    assert run("result", job.id).stdout == "0.750000 complaint\n0.250000 order\n"


def test_json_of_a_decision_is_its_response(run: Run, served: dict[str, Any]) -> None:
    done = run("x", "--choice", "a", "--choice", "b", "--probabilities", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["choices"][0]["text"] == "hello 0, wörld"


def test_json_of_a_job_without_tokens_ends_with_its_response(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    choice = {"index": 0, "text": "b", "finish_reason": "stop", "probabilities": {"b": 1.0}}
    worker.finish(body={"choices": [choice], "usage": usage})
    *_, done, body = map(json.loads, run("watch", job.id, "--json").stdout.splitlines())
    assert (done["type"], body["choices"][0]["probabilities"]) == ("done", {"b": 1.0})


def test_stdin_must_be_utf_8(run: Run) -> None:
    done = run("-", stdin=b"\xff\xfe")
    assert done.exit_code == 2
    assert done.stderr == (
        "omlx-submit: stdin: got bytes that are not UTF-8 (byte 0xff); "
        "convert them, as iconv -f WINDOWS-1252 -t UTF-8 does\n"
    )


@pytest.mark.usefixtures("served")
def test_json_prints_the_events(run: Run) -> None:
    done = run("--json", "x")
    events = [parse_event(line) for line in done.stdout.splitlines()]
    assert [event.type for event in events] == ["tokens", "tokens", "done"]


def test_no_stream_prints_the_text_at_once(run: Run, served: dict[str, Any]) -> None:
    assert run("--no-stream", "x").stdout == "hello 0, wörld\n"
    assert served["request"]["stream"] is False


@pytest.mark.usefixtures("served")
def test_no_stream_and_json_print_the_result(run: Run) -> None:
    body = json.loads(run("--no-stream", "--json", "x").stdout)
    assert body["choices"][0]["text"] == "hello 0, wörld"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_several_choices_come_one_after_the_other(run: Run, how: list[str]) -> None:
    assert run("x", "--n", "3", *how).stdout == (
        "hello 0, wörld\n--- choice 1 ---\nhello 1, wörld\n--- choice 2 ---\nhello 2, wörld\n"
    )


def test_the_options_become_fields(run: Run, served: dict[str, Any]) -> None:
    options = (
        "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --stop a --stop b "
        "--seed 7 -n 2 --logprobs --top-logprobs 3 --logit-bias 42=-1.5 --logit-bias 7=2 "
        "--ignore-eos --no-cache --raw --model demo --priority high"
    )
    assert run(*options.split(), "x").exit_code == 0
    assert served["request"] == {
        "model": "demo",
        "prompt": "x",
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop": ["a", "b"],
        "seed": 7,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"42": -1.5, "7": 2.0},
        "ignore_eos": True,
        "cache": False,
        "stream": True,
    }


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_who_asks_for_log_probabilities_is_told_what_shows_them(run: Run, how: list[str]) -> None:
    said = "--json shows the log-probabilities"
    assert said in run("x", "--logprobs", *how).stderr.splitlines()
    assert said not in run("x", "--logprobs", "--json", *how).stderr
    assert said not in run("x", *how).stderr
    assert said not in run("x", "--logprobs", "--detach", *how).stderr


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (SCHEMA, {"name": "answer", "schema": SCHEMA}),
        (
            {"name": "person", "strict": True, "schema": SCHEMA},
            {"name": "person", "strict": True, "schema": SCHEMA},
        ),
        ({"schema": SCHEMA}, {"name": "answer", "schema": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            {"name": "person", "schema": SCHEMA},
        ),
        # A schema whose only property is called schema is no wrapper.
        (
            {"type": "object", "properties": {"schema": SCHEMA}},
            {"name": "answer", "schema": {"type": "object", "properties": {"schema": SCHEMA}}},
        ),
    ],
)
def test_a_schema_may_come_in_the_wrappers_of_openai(
    run: Run, served: dict[str, Any], tmp_path: Path, document: Any, named: Any
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(document))
    assert run("x", "--schema", str(file)).exit_code == 0
    assert served["request"]["response_format"] == {"type": "json_schema", "json_schema": named}


def test_a_text_is_a_chat_unless_the_checkpoint_has_no_template(
    run: Run, served: dict[str, Any], connection: redis.Redis, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    assert run("Why is the sky blue?").exit_code == 0
    assert user_text(served) == "Why is the sky blue?"
    assert run("--raw", "def f(x):").exit_code == 0
    assert served["request"]["prompt"] == "def f(x):"
    announce(connection, chat_template=False)
    assert run("def f(x):").exit_code == 0
    assert served["request"]["prompt"] == "def f(x):"
    for option in ("--system=be brief", f"--tools={tools}"):
        refused = run("hi", option)
        assert refused.exit_code == 2
        assert "demo has no chat template; give a prompt instead" in refused.stderr


def test_a_text_for_a_model_that_nobody_announced_is_a_chat(
    run: Run, connection: redis.Redis
) -> None:
    job_id = run("--detach", "--queue-anyway", "--model", "asleep", "hi").stdout.strip()
    request = rq.job.Job.fetch(job_id, connection=connection, serializer="json").kwargs["request"]
    assert request == {"model": "asleep", "messages": [{"role": "user", "content": "hi"}]}


def test_a_system_message_goes_before_the_text(run: Run, served: dict[str, Any]) -> None:
    assert run("--system", "be brief", "hi").exit_code == 0
    assert served["request"]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_prompt_may_be_the_name_of_a_command(run: Run, served: dict[str, Any]) -> None:
    assert run("submit", "status").exit_code == 0
    assert user_text(served) == "status"
    assert run("--", "-1 is").exit_code == 0
    assert user_text(served) == "-1 is"


def test_a_model_of_vectors_beside_that_of_text_need_not_be_told_apart(
    run: Run, connection: redis.Redis
) -> None:
    announce(connection, "vectors", vector_size=4)
    assert run("--detach", "x").exit_code == 0


def test_detach_prints_the_id_and_leaves(run: Run, connection: redis.Redis) -> None:
    job_id = run("--detach", "x").stdout.strip()
    assert connection.exists(f"rq:job:{job_id}")


def test_a_failed_job_exits_with_1_and_its_sentence(run: Run, served: dict[str, Any]) -> None:
    served["error"] = "out of memory"
    for options in ([], ["--json"], ["--no-stream"]):
        done = run(*options, "x")
        assert done.exit_code == 1
        assert "out of memory" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([""], "PROMPT: is empty; give text"),
        ([" "], "PROMPT: is empty; give text"),
        (["x", "--completion-window", "0h"], "--completion-window: got '0h'; give a time such as"),
        (["x", "--temperature", "3"], "--temperature: got 3.0; give a number from 0 to 2"),
        (["x", "--temperature", "nan"], "--temperature: got 'nan'; give a number from 0 to 2"),
        (["x", "--temperature", "warm"], "--temperature: got 'warm'; give a number from 0 to 2\n"),
        (["x", "--n", "129"], "--n: got 129; give a whole number from 1 to 128"),
        (["x", "--model", "nope"], "run -m MODEL --model-alias nope, or pass --queue-anyway\n"),
        (["x", "--logit-bias", "5"], "got '5'; give ID=VALUE"),
        (["x", "--logit-bias", "a=5"], "--logit-bias: got the key 'a'"),
        (["x", "--top-logprobs", "2"], "--top-logprobs: got 2 without logprobs"),
        (["x", "--raw", "--system", "s"], "--system does not go with --raw"),
        (["x", "--priority", "low"], "--priority: got 'low'; give one of high, default, bulk\n"),
        (["x", "--tmeperature", "1"], "--tmeperature: no such option; did you mean --temperature"),
        (["pause", "a", "b"], "unexpected extra argument (b); see omlx-submit pause --help\n"),
        (["x", "y", "z"], "PROMPT: got 3 arguments; quote the prompt"),
        (["x", "y", "--n", "2"], "PROMPT: got 2 arguments; quote the prompt"),
        (["x" * 9000], "PROMPT: got 9000 characters, which are at least 1125 tokens"),
        (["x\udcff"], "PROMPT: got 'x\\udcff'; give text"),
        (["x\udcff", "--system", "s"], "PROMPT: got 'x\\udcff'; give text"),
        (["x", "--system", "s\udcff"], "--system: got 's\\udcff'; give text"),
        (["x", "--choice", "a", "--regex", "b"], "--choice does not go with --regex; leave one"),
        (["--raw", "x\udcff"], "PROMPT: got 'x\\udcff'; give text"),
        (["--redis-url", "http://:secret@host", "x"], "--redis-url: not the URL"),
        (["--redis-url", "redis://host:secret", "x"], "--redis-url: not the URL"),
        (["watch", "nope"], "no job has the id 'nope'"),
        (["result", "nope"], "no job has the id 'nope'"),
        (["status", "nope"], "no job has the id 'nope'"),
        (["cancel", "nope"], "no job has the id 'nope'"),
        (["watch", "\udcff"], "no job has the id '\\udcff'"),
        (["result", "\udcff"], "no job has the id '\\udcff'"),
        (["results", "\udcff"], "no batch has the id '\\udcff'"),
        (["x", "--idempotency-key", "\udcff"], "--idempotency-key: got '\\udcff'; give text"),
        (["status", "--watch", "inf"], "--watch: got 'inf'; give a number from 0.1 to 86400\n"),
        (["status", "--watch", "nan"], "--watch: got 'nan'; give a number from 0.1 to 86400\n"),
        (["status", "--watch", "1e10"], "--watch: got '1e10'; give a number from"),
        (["submit"], "omlx-submit: PROMPT: missing; see omlx-submit submit --help\n"),
    ],
)
def test_a_mistake_exits_with_2_and_one_sentence(
    run: Run, connection: redis.Redis, args: list[str], said: str
) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(connection.scan_iter("rq:job:*"))


def test_queue_anyway_takes_an_unknown_model(run: Run) -> None:
    assert run("--detach", "--queue-anyway", "--model", "asleep", "x").exit_code == 0


def test_an_unreachable_redis_exits_with_3_and_no_password(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.connection._RETRIES", 0)
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    batch = "batch-0123456789ab"
    for args in (["x"], ["status"], *(["watch", each] for each in ("j", batch)), ["result", "j"]):
        began = time.monotonic()
        done = run(*args, "--redis-url", url)
        assert done.exit_code == 3
        assert done.stderr.count("\n") == 1
        assert f"Redis at {url.replace(':secret@', '')} does not answer" in done.stderr
        assert "name another with --redis-url" in done.stderr
        assert "secret" not in done.stderr
        assert time.monotonic() - began < 10


def sentence_of(run: Run, url: str, *args: str) -> str:
    """What a command that Redis refuses says, in one line."""
    done = run(*args, "--redis-url", url)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 3
    (sentence,) = done.stderr.splitlines()
    return sentence


@pytest.mark.parametrize("command", [["status"], ["watch", "j"]])
def test_a_refused_password_exits_with_3(
    run: Run, private_server: RedisServer, command: list[str]
) -> None:
    with redis.Redis.from_url(private_server.url) as connection:
        connection.config_set("requirepass", "right")
    said = sentence_of(run, private_server.url.replace("//", "//:wrong@"), *command)
    assert "refuses the user or password" in said
    assert "wrong@" not in said


def test_a_missing_right_is_named(run: Run, private_server: RedisServer) -> None:
    with redis.Redis.from_url(private_server.url) as connection:
        announce(connection)
        connection.acl_setuser(
            "me",
            enabled=True,
            nopass=True,
            keys="*",
            channels="*",
            categories=["+@all"],
            commands=["-rpush"],
        )
    said = sentence_of(run, private_server.url.replace("//", "//me:x@"), "--detach", "x")
    assert "denies this user a right" in said
    assert "rpush" in said


def test_a_cluster_is_refused(run: Run) -> None:
    with redis_server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        assert "is part of a Redis Cluster, which is not" in sentence_of(run, server.url, "status")


def test_a_server_that_is_not_redis_is_told(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(100)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        assert "is not a Redis server" in sentence_of(run, url, "status")
        thread.join()


@pytest.mark.parametrize("entry", [{"event": "junk"}, {"no": "event"}])
def test_an_event_that_cannot_be_read_ends_with_1(
    run: Run, connection: redis.Redis, job: JobHandle, entry: dict[Any, Any]
) -> None:
    connection.xadd(f"omlx:events:{job.id}", entry, id="1-0")
    done = run("watch", job.id)
    assert done.exit_code == 1
    assert "holds an event that cannot be read" in done.stderr


@pytest.mark.parametrize("command", ["status", "models"])
def test_without_models_one_sentence_is_said(
    run: Run, connection: redis.Redis, command: str
) -> None:
    connection.flushall()
    done = run(command)
    assert (done.exit_code, done.stdout) == (0, "")
    remedy = "start one with omlx-worker run -m MODEL"
    assert done.stderr == f"no worker has announced a model yet; {remedy}\n"


def test_models_lists_what_workers_announced(run: Run) -> None:
    assert "models/demo" in run("models").stdout
    state = json.loads(run("models", "--json").stdout)
    assert (state["alias"], state["info"]["context_length"]) == ("demo", 1024)


def test_text_of_a_model_reaches_a_pipe_unchanged(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    worker.step("A\x1b[31mRED\r")
    worker.finish()
    assert run("watch", job.id).stdout_bytes == b"A\x1b[31mRED\r\n"
    assert run("result", job.id).stdout_bytes == b"A\x1b[31mRED\r\n"


def test_watch_shows_a_job_from_its_beginning(run: Run, job: JobHandle, worker: FakeWorker) -> None:
    worker.step("one ")
    worker.step("two\n")
    worker.finish()
    assert run("watch", job.id).stdout == "one two\n"


def test_thinking_and_markers_are_not_printed(run: Run, job: JobHandle, worker: FakeWorker) -> None:
    worker.step("Hm.</th", markup=between(("<think>", "</think>"), thinks=True))
    worker.step("ink>\nIt ")
    worker.step("is.<think>")
    worker.finish()
    assert run("watch", job.id).stdout == "It is.\n"


def test_watch_shows_the_text_of_a_job_that_published_none(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    worker.texts = {0: "silent", 1: "too"}
    worker.finish(n=4)
    assert run("watch", job.id).stdout == "silent\n--- choice 1 ---\ntoo\n"


def test_a_job_without_text_prints_nothing(run: Run, job: JobHandle, worker: FakeWorker) -> None:
    worker.finish(n=1)
    assert run("watch", job.id).stdout == ""


def test_result_prints_the_text_or_the_body(run: Run, job: JobHandle, worker: FakeWorker) -> None:
    worker.step("text")
    body = worker.finish()
    assert run("result", job.id).stdout == "text\n"
    assert json.loads(run("result", job.id, "--json").stdout) == body


def test_a_result_that_does_not_come_in_time_has_a_code_of_its_own(
    run: Run, job: JobHandle, worker: FakeWorker
) -> None:
    late = run("result", job.id, "--timeout", "0")
    assert late.exit_code == 4
    assert late.stderr == f"omlx-submit: job {job.id} did not finish within 0 s; it goes on\n"
    worker.fail("out of memory")
    assert run("result", job.id, "--timeout", "0").exit_code == 1


def test_status_prints_what_a_job_does(run: Run, job: JobHandle, worker: FakeWorker) -> None:
    worker.step("a")
    lines = run("status", job.id).stdout.splitlines()
    assert "status          started" in lines
    assert "tokens          1" in lines
    local = job.state().enqueued_at.astimezone()
    assert f"enqueued_at     {local:%Y-%m-%d %H:%M:%S %Z}" in lines
    state = json.loads(run("status", job.id, "--json").stdout)
    assert (state["id"], state["queue"]) == (job.id, "omlx:demo:default")


def test_status_says_what_a_job_waits_for(
    run: Run, job: JobHandle, connection: redis.Redis
) -> None:
    def note(job_id: str) -> str:
        lines = run("status", job_id).stdout.splitlines()
        return next(line for line in lines if line.startswith("note ")).partition(" ")[2].strip()

    sign_on(connection, "mac-1")
    assert note(job.id) == "the job is the next that a worker of demo takes"
    later = run("--detach", "x").stdout.strip()
    assert note(later) == "waiting behind 1 job"
    assert json.loads(run("status", later, "--json").stdout)["position"] == 1
    run("pause", "demo")
    assert note(job.id) == "demo is paused; omlx-submit resume demo lets it go on"
    run("cancel", job.id)
    assert "note" not in run("status", job.id).stdout


def test_status_alone_prints_models_and_queues(run: Run, job: JobHandle) -> None:
    state = json.loads(run("status", "--json").stdout)
    waiting = [state["queues"][name]["waiting"] for name in ("default", "bulk")]
    assert (state["alias"], waiting) == ("demo", [1, 0])


def test_status_shows_jobs_of_a_model_that_no_worker_has_announced(
    run: Run, connection: redis.Redis
) -> None:
    run("--detach", "--queue-anyway", "--model", "asleep", "x")
    lines = [line.split() for line in run("status").stdout.splitlines()]
    assert [line[:6] for line in lines if line[:1] == ["asleep"]] == [
        ["asleep", "not", "announced", "0", "1", "0"]
    ]
    _, state = map(json.loads, run("status", "--json").stdout.splitlines())
    assert (state["alias"], state["info"]) == ("asleep", None)
    assert state["queues"]["default"]["waiting"] == 1
    assert "asleep" not in run("models").stdout
    connection.flushall()
    run("--detach", "--queue-anyway", "--model", "asleep", "x")
    assert "asleep" in run("status").stdout
    assert "no worker has announced a model yet" in run("models").stderr


def test_status_leaves_out_empty_queues_and_those_of_others(
    run: Run, connection: redis.Redis
) -> None:
    run("cancel", run("--detach", "--queue-anyway", "--model", "asleep", "x").stdout.strip())
    rq.Queue("mail", connection=connection).enqueue(print)
    assert len(run("status", "--json").stdout.splitlines()) == 1


def test_cancel_says_what_it_did(run: Run, job: JobHandle) -> None:
    for _ in range(2):
        done = run("cancel", job.id)
        assert (done.exit_code, done.stdout) == (0, "cancelled\n")
    for command in ("watch", "result"):
        done = run(command, job.id)
        assert done.exit_code == 1
        said = f"job {job.id} cancelled: the job was cancelled before a worker took it\n"
        assert done.stderr == f"omlx-submit: {said}"


def test_a_file_in_place_of_a_prompt_is_told_to_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("rows.jsonl", "--detach").exit_code == 0
    Path("rows.jsonl").write_text("")
    refused = run("rows.jsonl", "--detach")
    assert refused.exit_code == 2
    assert "run its rows with omlx-submit run rows.jsonl" in refused.stderr
