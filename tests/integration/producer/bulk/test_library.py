"""Bulk work from Python: rows of many kinds in, results out, on a real server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from omlx_producer import (
    BulkResult,
    InvalidRequest,
    JobCancelled,
    JobTimeout,
    Producer,
    UnknownJob,
    read_results,
)
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.options import RunOptions
from omlx_producer.wire import ResponseFormat
from tests.helpers.bulk_runs import batch_line, ids, write_rows
from tests.helpers.fake_worker import announce
from tests.helpers.workers import ALIAS, run_burst, running_worker

FIELDS: Any = {"max_completion_tokens": 5, "seed": 1}


@pytest.fixture
def producer(connection: redis.Redis) -> Producer:
    announce(connection, ALIAS)
    return Producer(connection)


@pytest.fixture
def served(redis_url: str, producer: Producer) -> Iterator[Producer]:
    """A producer with a worker."""
    with running_worker(redis_url):
        yield producer


def waiting(connection: redis.Redis) -> int:
    """Rows that wait in Redis."""
    keys = connection.scan_iter("omlx:batch:*:waiting:*")
    return sum(int(connection.llen(key)) for key in keys)


@pytest.mark.parametrize("into", ["a file", "the program"])
def test_a_cancel_by_somebody_else_is_an_error_of_its_own(
    producer: Producer, connection: redis.Redis, tmp_path: Path, into: str
) -> None:
    def cancel(*_: object) -> None:
        for key in connection.scan_iter("omlx:batch:????????????"):
            Batch(connection, f"batch-{key.decode()[-12:]}").cancel()

    out = {"a file": tmp_path / "out.jsonl", "the program": None}[into]
    with pytest.raises(JobCancelled, match=r"^batch-\w+ was cancelled by \S+@\S+$"):
        list(producer.run(["a", "b"], out, progress=cancel, **FIELDS))
    assert waiting(connection) == 0


@pytest.mark.parametrize(
    ("name", "content", "arguments", "sentence"),
    [
        ("no.csv", None, {}, "no.csv: there is no such file; give the path of a file"),
        ("rows.dat", "x", {}, "format: missing, and rows.dat has no suffix that names it; give j"),
        ("rows.jsonl", "name\nAnn", {}, "; write an object a line; or give the format csv or text"),
        ("rows.jsonl", '{"name": "Ann"}', {}, "for objects of your own give a template"),
        ("rows.txt", "Ann", {"template": "{a}"}, "leave it out, or give the format csv"),
        ("rows.csv", 'a"b,"c\n', {}, "or give what is between the cells as the delimiter"),
    ],
)
def test_a_program_is_told_of_no_options_of_commands(
    producer: Producer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | None,
    arguments: Any,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        producer.run(name, "out.jsonl", **arguments)
    assert sentence in str(refused.value)
    assert "--" not in str(refused.value)


class Frame:
    """What a frame of polars does."""

    def __init__(self, cells: dict[str, list[Any]]) -> None:
        self.cells = cells

    @property
    def columns(self) -> list[str]:
        return list(self.cells)

    def __len__(self) -> int:
        return max(map(len, self.cells.values()))

    def iter_rows(self, *, named: bool) -> Iterator[dict[str, Any]]:
        assert named
        for number in range(len(self)):
            yield {name: values[number] for name, values in self.cells.items()}

    def __getitem__(self, places: list[int]) -> Self:
        return type(self)({name: [v[n] for n in places] for name, v in self.cells.items()})

    def rename(self, names: dict[str, str]) -> Self:
        return type(self)({names[name]: values for name, values in self.cells.items()})

    def hstack(self, other: Self) -> Self:
        return type(self)(self.cells | other.cells)


# Results from an iterator


def test_prompts_have_results_in_their_order(served: Producer) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    results = list(served.run(prompts, ordered=True, **FIELDS))
    assert [result.custom_id for result in results] == [f"row-{n}" for n in range(1, 41)]
    assert all(result.completion for result in results)
    alone = served.submit(messages=[{"role": "user", "content": "prompt 7"}], **FIELDS).result(30)
    assert results[7].text == alone.text


def test_results_come_as_their_rows_end(redis_url: str, producer: Producer) -> None:
    long = {"custom_id": "long", "prompt": "x", "max_tokens": 100, "ignore_eos": True}
    short = {"custom_id": "short", "prompt": "x", "max_tokens": 2}
    with running_worker(redis_url, step_seconds=0.005):
        assert [result.custom_id for result in producer.run([long, short])] == ["short", "long"]


def test_dictionaries_are_rows_as_in_a_file(served: Producer) -> None:
    rows = [
        {"custom_id": "a", "prompt": "hello", "max_tokens": 3},
        {"id": 2, "prompt": [1, 2, 3]},
        {"custom_id": "c", "messages": [{"role": "user", "content": "hello"}]},
        batch_line("d"),
    ]
    results = {result.custom_id: result for result in served.run(rows, **FIELDS)}
    assert sorted(results) == ["2", "a", "c", "d"]
    used = {name: r.completion.usage for name, r in results.items() if r.completion}
    assert used["a"].completion_tokens <= 3
    assert used["2"].prompt_tokens == 3
    assert results["c"].completion["object"] == "chat.completion"  # type: ignore[index]


def test_a_template_makes_prompts_of_records(served: Producer) -> None:
    rows = ({"title": title} for title in ("Rust", "Iron"))
    results = list(served.run(rows, template="# {title}", raw=True, ordered=True, **FIELDS))
    alone = served.submit(prompt="# Iron", **FIELDS).result(30)
    assert results[1].text == alone.text


def test_a_path_is_a_file_of_rows(served: Producer, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 5)
    assert {result.custom_id for result in served.run(source)} == {f"r{n}" for n in range(5)}


def test_a_row_that_cannot_run_is_a_result_with_its_reason(served: Producer) -> None:
    rows: list[Any] = [{"prompt": "hello", "temperature": "hot"}, {"prompt": "hello"}, 7]
    bad, good, no_row = served.run(rows, ordered=True, **FIELDS)
    assert (bad.code, bad.completion, bad.text) == ("invalid_request", None, None)
    assert "temperature" in bad.reason
    assert good.text
    assert no_row == BulkResult(
        None, None, "unparsable", "line 3: got 7; give a text or a dictionary"
    )


def test_an_iterator_that_is_closed_takes_its_rows_out_of_redis(
    redis_url: str, connection: redis.Redis, producer: Producer
) -> None:
    with running_worker(redis_url, max_rows=2, step_seconds=0.005):
        with producer.run([f"prompt {n}" for n in range(100)], **FIELDS) as results:
            assert next(results).text
            assert waiting(connection)
        assert not waiting(connection)


def test_progress_is_told_up_to_the_last_row(served: Producer) -> None:
    told: list[tuple[int, int | None]] = []
    rows = [f"prompt {n}" for n in range(40)]
    list(served.run(rows, progress=lambda *counts: told.append(counts), **FIELDS))
    assert told == sorted(told)
    assert told[-1] == (40, 40)
    assert {total for _, total in told} == {40}


@pytest.mark.parametrize("rows", [7, {"prompt": "x"}, b"x", None])
def test_rows_of_another_kind_are_refused(producer: Producer, rows: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"rows: got .*; give a path, a frame, or texts"):
        producer.run(rows)


def test_a_table_keeps_columns_of_a_file_alone(producer: Producer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        producer.run(["one"], tmp_path / "out.csv", keep=True)
    assert str(refused.value) == (
        "keep: adds the columns of a file to a table; give the path of a file as rows"
    )


def test_an_option_is_refused_by_its_name(producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match=r"^template: got 'x'"):
        next(producer.run([{"text": "x"}], template="x"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0}, "window: got 0; give a whole number of at least 1"),
        ({"window": "many"}, "window: got 'many'; give a whole number"),
        ({"job_timeout": -1}, "job_timeout: got -1; give a whole number of at least 1"),
        ({"limit": 0}, "limit: got 0; give a whole number of at least 1"),
        ({"priority": "urgent"}, "priority: got 'urgent'; give one of high, default and bulk"),
        (
            {"format": "xml"},
            "format: got 'xml'; give one of jsonl, text, csv, parquet and pictures",
        ),
        ({"empty": "no"}, "empty: got 'no'; give one of skip, fail and run"),
        ({"template": 5}, "template: got 5; give text"),
        ({"queue_anyway": True}, "queue_anyway: is of the command; give require_known_model=False"),
        ({"output": "out.jsonl"}, "output: is of the command; give out"),
        ({"detach": True}, "detach: is of the command; call Producer.batch"),
        ({"dry_run": True}, "dry_run: is of the command; call omlx-submit run --dry-run"),
    ],
)
def test_options_are_refused_as_those_of_the_command_line_are(
    producer: Producer, tmp_path: Path, options: Any, said: str
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 1)
    for call in (producer.batch, producer.run):
        with pytest.raises(InvalidRequest, match=f"^{said}"):
            call(source, **options)


@pytest.mark.parametrize(
    ("option", "field"), [("schema", "response_format"), ("choice", "structured_outputs.choice")]
)
def test_options_of_answers_are_told_by_their_names_in_a_request(
    producer: Producer, option: str, field: str
) -> None:
    asked: Any = {option: "name"}
    for call in (producer.batch, lambda rows, **more: next(producer.run(rows, **more))):
        with pytest.raises(InvalidRequest, match=f"^{option}: unknown field; give {field}$"):
            call(["a"], **asked)


def test_rows_with_empty_fields_are_counted_unless_they_can_be_read_only_once(
    served: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.shape.FIRST_ROWS", 1)
    rows, template = [{"call": "a"}, {"call": ""}, {"call": None}], "Call: {call}"
    for each in (rows, Frame({"call": ["a", "", None]})):
        with pytest.raises(InvalidRequest, match=r"^empty: missing, and 2 rows have an empty"):
            next(served.run(each, template=template))
    results = list(served.run(iter(rows), template=template, ordered=True, **FIELDS))
    assert [result.code for result in results] == ["", "invalid_request", "invalid_request"]
    for each in (rows, Frame({"call": ["a", "", None]})):
        totals = set[int | None]()
        told: Any = {"progress": lambda _, total, totals=totals: totals.add(total)}
        results = list(served.run(each, template=template, empty="skip", **told, **FIELDS))
        assert [result.custom_id for result in results] == ["row-1"]
        assert totals == {1}


@pytest.mark.parametrize("rows", [[], iter(()), Frame({"prompt": []})])
def test_no_rows_are_refused(producer: Producer, connection: redis.Redis, rows: Any) -> None:
    for call in (producer.batch, lambda rows: list(producer.run(rows))):
        with pytest.raises(InvalidRequest, match=r"^rows: got none; give at least one$"):
            call(rows)
    assert not connection.keys("omlx:batch:*")


def test_what_is_no_path_style_or_time_is_refused(producer: Producer) -> None:
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match=r"^out: got int; give a path$"):
        producer.run(["a"], wrong)
    style: Any = "foo"
    with pytest.raises(InvalidRequest, match=r"^progress: got 'foo'; give a function, or one of"):
        next(producer.run(["a"], progress=style))
    batch, times = producer.batch(["a"]), ("x", float("nan"))
    for wait in (batch.wait, lambda timeout: producer.result("nosuch", timeout=timeout)):
        for timeout in times:
            with pytest.raises(InvalidRequest, match=r"^timeout: got .*; give seconds, or None$"):
                wait(timeout)  # type: ignore[arg-type]
    with pytest.raises(UnknownJob, match="no job has the id 5"):
        producer.status(wrong)


@pytest.mark.parametrize("option", ["only_failures", "replace"])
def test_options_of_an_output_need_one(producer: Producer, option: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{option}: given without out; give out"):
        producer.run(["a"], **{option: True})


def test_a_field_that_json_cannot_hold_is_named(producer: Producer) -> None:
    options: Any = {"stop": object()}
    with pytest.raises(InvalidRequest, match=r"^stop: cannot be sent as JSON \(.*\); change it$"):
        producer.run(["a"], **options)


def test_a_limit_of_tokens_has_one_name(producer: Producer) -> None:
    limits: Any = {"max_tokens": 5, "max_completion_tokens": 9}
    with pytest.raises(InvalidRequest, match=r"^max_tokens: given beside max_completion_tokens"):
        next(producer.run(["a"], **limits))


@pytest.mark.parametrize("option", ["template", "id_field"])
def test_texts_have_no_columns(producer: Producer, option: str) -> None:
    options: Any = {option: "{x}"}
    with pytest.raises(InvalidRequest, match=rf"^{option}: texts have no columns; leave it out"):
        next(producer.run(["a"], **options))


# Results in files


def test_rows_go_into_a_file_and_are_read_again(served: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = [*(f"prompt {n}" for n in range(20)), ""]
    assert served.run(rows, out, ordered=True, **FIELDS) == Counter(invalid_request=1)
    *good, bad = read_results(out)
    assert [result.custom_id for result in good] == ids(out) == [f"row-{n}" for n in range(1, 21)]
    assert (bad.custom_id, bad.code) == ("row-21", "invalid_request")


def test_a_run_that_ended_early_goes_on_with_the_same_call(
    served: Producer, connection: redis.Redis, tmp_path: Path
) -> None:
    out, rows = tmp_path / "out.jsonl", [f"prompt {n}" for n in range(60)]

    def end(done: int, _: int | None) -> None:
        if done:
            raise RuntimeError("ended")

    with pytest.raises(RuntimeError, match="ended"):
        served.run(rows, out, window=5, progress=end, **FIELDS)
    assert 0 < len(ids(out)) < 60
    first = ids(out)
    assert not served.run(rows, out, window=5, **FIELDS)
    assert sorted(ids(out)) == sorted(f"row-{n}" for n in range(1, 61))
    assert ids(out)[: len(first)] == first


@pytest.mark.parametrize("edited", ["text\nfirst\na\nb\n", "text\nb\n", "text\n", ""])
def test_an_input_that_is_edited_during_a_run_makes_no_table(
    served: Producer, tmp_path: Path, edited: str
) -> None:
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    source.write_text("text\na\nb\n")
    asked: Any = {"template": "{text}", "keep": True, **FIELDS}

    with pytest.raises(OSError, match="has changed since the run began") as raised:
        served.run(
            source, out, progress=lambda done, _: done and source.write_text(edited), **asked
        )
    assert raised.value.filename == str(source)
    assert not out.exists()

    source.write_text("text\na\nb\n")
    assert not served.run(source, out, **asked)
    assert [line.split(",")[0] for line in out.read_text().splitlines()[1:]] == ["a", "b"]


def test_only_what_failed_runs_again(redis_url: str, producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows: list[Any] = ["hello", {"prompt": "hello", "model": "later"}]
    with running_worker(redis_url):
        assert producer.run(rows, out, **FIELDS) == {"model_not_found": 1}
        edited = ["hello", {"prompt": "hello", "model": ALIAS}]
        assert not producer.run(edited, out, only_failures=True, **FIELDS)
    assert sorted(ids(out)) == ["row-1", "row-2"]


def test_other_options_need_leave_to_replace_results(served: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    served.run(["hello"], out, max_tokens=9, seed=1)
    with pytest.raises(InvalidRequest, match="has results of other options"):
        served.run(["hello"], out, max_tokens=2, seed=1)
    assert not served.run(["hello"], out, replace=True, max_tokens=2, seed=1)
    (result,) = read_results(out)
    assert result.completion
    assert result.completion.usage.completion_tokens <= 2
    assert (tmp_path / "out.jsonl.1").exists()


def test_fields_may_be_of_their_own_types(served: Producer, tmp_path: Path) -> None:
    document = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    form = ResponseFormat.model_validate(document)
    assert not served.run(["hello"], tmp_path / "out.jsonl", response_format=form, **FIELDS)
    kept = RunOptions.of_run(tmp_path / "out.jsonl")
    assert kept is not None
    assert ResponseFormat.model_validate(kept.sampling["response_format"]) == form


# Frames


def test_a_frame_comes_back_with_its_answers(served: Producer) -> None:
    frame = Frame({"id": [4, 5, 6], "title": ["Rust", None, "Iron"], "error": [1, 2, 3]})
    answered = served.run(frame, template="# {title}", empty="fail", **FIELDS).frame()
    assert isinstance(answered, Frame)
    cells = answered.cells
    assert list(cells)[:5] == ["id", "title", "input.error", "custom_id", "text"]
    assert cells["custom_id"] == ["4", "5", "6"]
    assert [bool(count) for count in cells["completion_tokens"]] == [True, False, True]
    assert [bool(error) for error in cells["error"]] == [False, True, False]
    assert cells["title"] == ["Rust", None, "Iron"]


def test_each_choice_is_a_row_of_the_frame(served: Producer) -> None:
    frame = Frame({"prompt": ["hello", "goodbye"]})
    cells = served.run(frame, n=2, **FIELDS).frame().cells
    assert cells["prompt"] == ["hello", "hello", "goodbye", "goodbye"]


def test_rows_that_were_no_frame_make_none(served: Producer) -> None:
    with pytest.raises(TypeError, match="the rows were no frame"):
        served.run(["hello"], **FIELDS).frame()


def test_a_frame_of_pandas_comes_back_as_one(served: Producer) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"title": ["Rust", None, "Iron"], "year": [1, 2, 3]}, index=[30, 10, 10]
    )
    answered = served.run(frame, template="# {title}, {year}", empty="fail", **FIELDS).frame()
    assert list(answered.index) == [30, 10, 10]
    assert answered["year"].dtype == frame["year"].dtype
    assert list(answered["custom_id"]) == ["row-1", "row-2", "row-3"]
    assert answered["text"].notna().tolist() == [True, False, True]
    assert "title: the template needs it" in answered["error"].iloc[1]


def test_a_frame_of_polars_comes_back_as_one(served: Producer) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"title": ["Rust", None, "Iron"], "year": [1, 2, 3]})
    answered = served.run(frame, template="# {title}, {year}", empty="fail", **FIELDS).frame()
    assert isinstance(answered, polars.DataFrame)
    assert answered["year"].dtype == frame["year"].dtype
    assert answered["text"].is_not_null().to_list() == [True, False, True]
    assert "title: the template needs it" in answered["error"][1]


# Detached batches


def test_a_batch_is_left_to_the_workers(redis_url: str, producer: Producer, tmp_path: Path) -> None:
    batch = producer.batch([*(f"prompt {n}" for n in range(20)), ""], **FIELDS)
    assert (batch.status().state, batch.status().rows) == ("open", 21)
    with pytest.raises(JobTimeout, match=f"{batch.id} did not end within 0.1 s"):
        batch.wait(timeout=0.1)
    with pytest.raises(JobTimeout, match="is not over; wait for it, or give partial=True"):
        batch.download(tmp_path / "out.jsonl")
    batch.download(tmp_path / "out.jsonl", partial=True)
    with pytest.raises(InvalidRequest, match=r"give a file whose name ends in \.jsonl, \.csv or"):
        batch.download(tmp_path / "out.txt", partial=True)
    run_burst(redis_url)
    told: list[tuple[int, int | None]] = []
    state = producer.find_batch(batch.id).wait(progress=lambda *counts: told.append(counts))
    assert (state.state, state.ok, state.failed) == ("done", 20, 1)
    assert told == [(21, 21)]
    results = list(batch.results())
    assert [result.custom_id for result in results] == [f"row-{n}" for n in range(1, 22)]
    assert [result.code for result in results if not result.completion] == ["invalid_request"]
    batch.download(tmp_path / "out.jsonl")
    assert len(list(read_results(tmp_path / "out.jsonl"))) == 21
    batch.download(tmp_path / "out.jsonl")
    with pytest.raises(InvalidRequest, match=r"its results left Redis at .*, for .*out\.jsonl"):
        list(batch.results())
    with pytest.raises(InvalidRequest, match="its results left Redis at"):
        batch.download(tmp_path / "other.jsonl")


def test_a_batch_is_cancelled(producer: Producer) -> None:
    batch = producer.batch(["hello"])
    assert batch.cancel()
    assert batch.wait(timeout=1).state == "cancelled"
    assert not batch.cancel()


def test_an_unknown_batch_is_an_error(producer: Producer) -> None:
    with pytest.raises(UnknownJob):
        producer.find_batch("batch-0123456789ab").status()
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match=r"^batch_id: got int; give the id of a batch$"):
        producer.find_batch(wrong)


def test_a_batch_is_found_by_the_id_that_the_gateway_has_of_it(producer: Producer) -> None:
    batch = producer.batch(["hello"])
    assert producer.find_batch(batch.id.replace("-", "_")) == batch


def test_the_command_line_knows_a_batch_of_python(
    connection: redis.Redis, producer: Producer
) -> None:
    batch = producer.batch(["hello"])
    assert Batch(connection, batch.id).read() == batch.status()
