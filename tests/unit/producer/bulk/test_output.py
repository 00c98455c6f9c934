"""The store of a run and the files made of it: appended to, counted once, rewritten."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import sqlite3
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.bulk import durable
from omlx_producer.bulk import output as output_module
from omlx_producer.bulk import store as store_module
from omlx_producer.bulk.durable import replacing
from omlx_producer.bulk.output import (
    Output,
    real_path,
    require_output,
    require_run_output,
)
from omlx_producer.bulk.row import BadRow, Row, RowResult, read_line, write_line
from omlx_producer.bulk.store import Store, errors_path, read_settings, run_path
from tests.helpers.bulk_runs import errors, ids, lines
from tests.helpers.row_results import bad, body, failed, ok, row, write


def test_results_and_errors_go_to_a_file_each(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b"), bad(3)).close()
    assert ids(out) == ["a"]
    assert lines(out)[0]["error"] is None
    assert lines(out)[0]["response"]["body"] == body("text of a")
    assert [(line["custom_id"], line["error"]["code"]) for line in errors(out)] == [
        ("b", "failed"),
        (None, "unparsable"),
    ]
    assert errors(out)[1]["error"]["line"] == 3
    assert all(line["response"] is None for line in errors(out))


def test_earlier_results_are_known_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b"), bad(3)).close()
    store = write(out)
    rows = [each.row for each in (ok("a"), failed("b"), bad(3), ok("c"), ok("a", prompt="edited"))]
    known = [store.see(each) for each in rows if isinstance(each, Row | BadRow)]
    assert [(each.is_done, each.failure and each.failure.code) for each in known[:4]] == [
        (True, None),
        (False, "failed"),
        (False, "unparsable"),
        (False, None),
    ]
    store.close()


def test_a_row_that_ran_again_has_one_line_in_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b"), ok("c")).close()
    write(out, ok("a", prompt="edited"), ok("b"), finish=True).close()
    assert sorted(ids(out)) == ["a", "b", "c"]
    assert lines(out)[-2]["id"].endswith(row("a", prompt="edited").digest)
    assert errors(out) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_row_that_fails_after_its_edit_keeps_its_result(tmp_path: Path, again: bool) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a", prompt="before"), ok("b")).close()
    write(out, failed("a"), finish=True).close()
    if again:
        write(out, finish=True, ordered=True).close()
    assert sorted(ids(out)) == ["a", "b"]
    assert lines(out)[0]["id"].endswith(row("a", prompt="before").digest)
    assert [line["custom_id"] for line in errors(out)] == ["a"]
    write(out, ok("a"), finish=True).close()
    assert sorted(ids(out)) == ["a", "b"]
    assert errors(out) == []


def test_bad_lines_that_the_input_no_longer_has_leave_the_errors(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, bad(3), bad(4)).close()
    write(out, bad(4), finish=True).close()
    assert [line["error"]["line"] for line in errors(out)] == [4]


def test_bad_lines_beyond_the_end_of_a_limited_run_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, bad(3)).close()
    write(out, ok("a"), finish=True, whole=False).close()
    assert [line["error"]["line"] for line in errors(out)] == [3]


def test_ordered_is_the_order_of_the_input_and_strangers_come_last(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("gone", 9)).close()
    write(out, ok("c", 3), ok("a", 1), ok("b", 2), finish=True, ordered=True).close()
    assert ids(out) == ["a", "b", "c", "gone"]


def test_a_custom_id_may_be_any_text(tmp_path: Path) -> None:
    names = ["ünï", "\u2028", '"', "x" * 512, "\ud800"]
    with contextlib.closing(write(tmp_path / "out.jsonl", *map(ok, names))) as store:
        assert all(store.see(row(name)).is_done for name in names)
    assert ids(tmp_path / "out.jsonl") == names


def test_an_output_is_valid_utf_8_whatever_a_reason_quotes(tmp_path: Path) -> None:
    strange = RowResult(row("a"), "bulk-1-1", code="failed", reason="got \ud800")
    line = write_line(strange)
    assert json.loads(line.decode("utf-8"))["error"]["message"] == "got \ud800"


def test_a_link_to_itself_is_no_output(tmp_path: Path) -> None:
    link, other = tmp_path / "link.jsonl", tmp_path / "other.jsonl"
    link.symlink_to(other)
    other.symlink_to(link)
    with pytest.raises(InvalidRequest, match=r"link.jsonl: is a link that leads to itself; give"):
        real_path(link)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_replaced_files_keep_their_permissions_and_new_ones_take_them(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    results = out.with_name(f"{name}.jsonl") if name == "out.csv" else out
    write(out, ok("b", 2)).close()
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    # The table is new, the others are rewritten.
    write(out, ok("a", 1), failed("c", 3), finish=True, ordered=True).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    results.chmod(0o640)
    errors_path(out).unlink()
    write(out).close()
    assert stat.S_IMODE(errors_path(out).stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_file_is_replaced_without_touching_what_a_link_beside_it_names(
    tmp_path: Path, name: str
) -> None:
    out, precious = tmp_path / name, tmp_path / "precious"
    precious.write_text("precious")
    for replaced in (out, out.with_name("out.csv.jsonl"), errors_path(out)):
        replaced.with_name(f"{replaced.name}.new").symlink_to(precious)
    write(out, ok("b", 2), failed("c", 3), ok("a", 1), finish=True, ordered=True).close()
    assert precious.read_text() == "precious"
    assert not out.is_symlink()
    assert len(out.read_bytes().splitlines()) == {"out.jsonl": 2, "out.csv": 4}[name]


def test_what_a_kill_left_of_a_rewrite_goes_with_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    draft = replacing(out)
    draft.__enter__()
    # The process is killed here.
    assert len(list(tmp_path.iterdir())) == 1
    write(out, ok("a")).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.errors.jsonl",
        "out.jsonl.run",
    ]


def test_two_runs_on_hard_links_of_one_file_write_a_file_each(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.touch()
    os.link(one, two)
    with Output.open(one) as first, Output.open(two) as second:
        for output, name in ((first, "a"), (second, "b")):
            output.store.see(row(name))
            output.commit([ok(name)])
    assert (ids(one), ids(two)) == (["a"], ["b"])
    # So has a copy of links that a backup makes of the files of a run.
    os.link(one, tmp_path / "backup.jsonl")
    write(one, ok("c")).close()
    assert (ids(one), ids(tmp_path / "backup.jsonl")) == (["a", "c"], ["a"])


def test_a_record_of_a_run_has_one_name(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a")).close()
    os.link(run_path(out), tmp_path / "other.jsonl.run")
    for output in (out, tmp_path / "other.jsonl"):
        with pytest.raises(InvalidRequest, match=r"run: has other names, as hard links; copy it"):
            Store(output)


def test_a_link_has_the_files_beside_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, out = tmp_path / "link.jsonl", tmp_path / "folder" / "out.jsonl"
    link.symlink_to(out)
    assert real_path(link) == out.resolve()
    assert real_path(Path("plain.jsonl")) == Path("plain.jsonl")


def test_what_is_no_file_is_no_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "out.csv.jsonl").mkdir()
    for name in ("fifo.csv", "out.csv.jsonl", "out.csv"):
        with pytest.raises(InvalidRequest, match=r": is not a regular file; give another output$"):
            require_output(tmp_path / name)


def test_failures_are_counted_by_code(tmp_path: Path) -> None:
    refused = RowResult(row("c"), "bulk-1-1", code="invalid_request")
    out = tmp_path / "out.jsonl"
    expected = {"failed": 1, "invalid_request": 1, "unparsable": 1}
    for results in ([ok("a"), failed("b"), refused, bad(4)], []):
        with contextlib.closing(write(out, *results)) as store:
            assert store.failures() == expected


def test_a_worker_s_line_is_written_as_it_came(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    line = write_line(ok("a")).replace(b": ", b":  ")
    write(out, RowResult.of_line(row("a"), line)).close()
    assert out.read_bytes() == line


def test_lines_say_which_version_of_a_row_they_are() -> None:
    for result in (ok("a"), failed("a"), bad(3), bad(3, "a")):
        assert read_line(write_line(result)) == (result.row.digest, result.ok)
    for line_id in ("batch_req_wnaDys", "batch_req_67c5e1b2a4d48190b5c4d1e2f3a4b5c6"):
        # As OpenAI's own results are named.
        assert read_line(json.dumps({"id": line_id, "error": None}).encode()) is None
    for line in (b'{"custom_id": "a"}', b"[1]", b"nonsense"):
        assert read_line(line) is None


def test_the_record_of_a_private_output_is_private(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch(0o600)
    write(out, ok("a")).close()
    assert stat.S_IMODE(run_path(out).stat().st_mode) == 0o600


@pytest.mark.parametrize("precious", ['{"precious": 1}\n', "no line end"])
@pytest.mark.parametrize("name", ["out.csv", "out.csv.jsonl", "out.csv.errors.jsonl"])
def test_a_file_of_something_else_is_no_output(tmp_path: Path, name: str, precious: str) -> None:
    (tmp_path / name).write_text(precious)
    with pytest.raises(InvalidRequest, match="exists and is of no run of omlx-submit; give anoth"):
        require_run_output(tmp_path / "out.csv", "-", keep=False)


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Output.open(out) as first:
        first.store.remember({"input": "x"})
        with pytest.raises(InvalidRequest, match="run: another command is writing it; wait"):
            Output.open(out).__enter__()
    with Output.open(out) as second:
        assert second.store.run == first.store.run
    assert read_settings(out) == {"input": "x"}
    assert read_settings(tmp_path / "other.jsonl") is None


@pytest.mark.parametrize(
    "record",
    [
        '{"run": "01234567", "settings": null}',
        '{"version": 99, "run": "01234567", "settings": null}',
        '{"version": 2, "run": "01234567"}',
        '{"version": 2, "settings": null}',
        # Batches of other runs have ids that begin with it.
        '{"version": 2, "run": "", "settings": null}',
        '{"version": 2, "run": 5, "settings": null}',
    ],
)
def test_a_record_of_a_run_that_is_none_is_told(tmp_path: Path, record: str) -> None:
    run_path(out := tmp_path / "out.jsonl").write_text(f"{record}\n" * 20)
    with pytest.raises(InvalidRequest, match="run: another version of omlx-submit wrote it; us"):
        Output.open(out).__enter__()


def test_a_record_of_a_version_with_a_database_is_told(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(run_path(out := tmp_path / "out.jsonl"))) as database:
        database.execute("CREATE TABLE run (id TEXT)")
    with pytest.raises(InvalidRequest, match="run: another version of omlx-submit wrote it; us"):
        Output.open(out).__enter__()


def in_child(work: Callable[[], object]) -> int:
    """Run something in a process of its own; returns its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)


STEPS = [
    pytest.param(store_module, "write_line", id="before the lines"),
    pytest.param(store_module, "append", id="between the files"),
    pytest.param(durable, "sync_file", id="behind the lines"),
    pytest.param(output_module, "write_table", id="before the table"),
    pytest.param(durable, "sync_folder", id="behind a draft", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("owner", "step"), STEPS)
def test_a_run_killed_anywhere_has_each_row_once_in_the_end(
    tmp_path: Path, owner: Any, step: str
) -> None:
    before = [ok("a", 1), ok("b", 2, prompt="before"), failed("c", 3)]
    edited = [ok("a", 1), ok("b", 2), ok("c", 3, prompt="edited"), failed("d", 4), ok("e", 5)]

    def command(out: Path, rows: list[RowResult]) -> None:
        """Run the rows that have no result yet."""
        with Output.open(out) as output:
            new = []
            for each in rows:
                assert isinstance(each.row, Row)
                known = output.store.see(each.row)
                if not (known.is_done or known.has_failed):
                    new.append(each)
            output.commit(new)
            output.finish(ordered=True)

    def killed(out: Path, at: int) -> None:
        count, whole = itertools.count(1), getattr(owner, step)

        def counted(*args: Any, **more: Any) -> Any:
            if next(count) == at:
                os._exit(9)
            return whole(*args, **more)

        setattr(owner, step, counted)
        for rows in (before, edited):
            command(out, rows)

    for at in itertools.count(1):
        out = tmp_path / str(at) / "out.csv"
        out.parent.mkdir()
        died = in_child(partial(killed, out, at))
        assert in_child(partial(command, out, edited)) == 0
        result = [
            (line["custom_id"], line["id"][-24:]) for line in lines(tmp_path / f"{out}.jsonl")
        ]
        assert result == [(each.row.custom_id, each.row.digest) for each in edited if each.ok], at
        assert [line["custom_id"] for line in errors(out)] == ["d"]
        assert len(out.read_bytes().splitlines()) == 1 + len(edited)
        assert sorted(path.name for path in out.parent.iterdir()) == [
            *("out.csv", "out.csv.errors.jsonl", "out.csv.jsonl", "out.csv.run")
        ]
        if died == 0:
            break
        assert died == 9
    assert at > 1


def test_what_a_kill_left_of_a_line_goes_with_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b"), ok("c"), failed("d")).close()
    for path in (out, errors_path(out)):
        whole = path.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        for left in (1, len(last) // 2, len(last) - 1):
            for zeros in (0, 1, 4096):
                path.write_bytes(whole[:-left] + zeros * b"\0" + zeros * b"\n")
                with contextlib.closing(Store(out)) as store:
                    known = [store.see(row(name)) for name in "abcd"]
                done = [each.is_done or each.has_failed for each in known]
                assert done.index(False) == (2 if path == out else 3)
                assert done.count(False) == 1
                assert path.read_bytes() == whole[: -len(last)]
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "theirs", ["nonsense\n", "no line end", '{"id": "batch_req_5", "custom_id": "a"}\n']
)
def test_a_line_of_something_else_is_told_and_stays(tmp_path: Path, theirs: str) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b")).close()
    for path, line in ((out, 2), (errors_path(out), 2)):
        whole = path.read_text()
        path.write_text(whole + theirs)
        told = f"{path.name}: line {line}: something else wrote it; remove it, or give another outp"
        with pytest.raises(InvalidRequest, match=told):
            Store(out)
        assert path.read_text() == whole + theirs
        path.write_text(whole)


def test_a_line_that_is_no_json_any_more_is_told_where_a_table_needs_it(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    write(out, ok("a")).close()
    results = tmp_path / "out.csv.jsonl"
    results.write_bytes(results.read_bytes().replace(b'"error"', b"error"))
    with pytest.raises(InvalidRequest, match=r"csv.jsonl: the line at byte 0: something else wro"):
        write(out, finish=True)


def test_a_disk_that_is_full_at_any_byte_loses_no_line(tmp_path: Path) -> None:
    results = [ok("a", 1), failed("b", 2), ok("c", 3), failed("d", 4)]

    def command(out: Path, room: int | None) -> None:
        """Run the rows that have not run. Files may have this many bytes."""
        with Output.open(out) as output:
            known = [(each, output.store.see(each.row)) for each in results]
            if room is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            try:
                output.store.remember({"input": "x"})
                output.commit([each for each, has in known if not (has.is_done or has.has_failed)])
            except OSError as error:
                os._exit(28 if str(error.filename).startswith(str(out)) else 1)
            if room is None:
                output.finish(ordered=True)

    rooms = [0, 30, 100, *range(240, 1000, 60)]
    ends = []
    for room in rooms:
        out = tmp_path / str(room) / "out.jsonl"
        out.parent.mkdir()
        ends.append(in_child(partial(command, out, room)))
        assert not any(path.read_bytes()[-1:] not in (b"", b"\n") for path in out.parent.iterdir())
        assert in_child(partial(command, out, None)) == 0
        assert (ids(out), ids(errors_path(out))) == (["a", "c"], ["b", "d"])
    assert ends == [*(28 for end in ends if end), *(0 for end in ends if not end)]
    assert len(set(ends)) == 2


def test_a_disk_that_is_full_at_the_end_leaves_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(out, ok("b", 2), ok("a", 1)).close()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_file", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(out, finish=True, ordered=True)
    assert caught.value.filename == str(out)
    assert ids(out) == ["b", "a"]
    write(out, ok("a", 1), ok("b", 2), finish=True, ordered=True).close()
    assert ids(out) == ["a", "b"]
