"""The store of a run and the files made of it: appended to, counted once, rewritten."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
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
    LinesFile,
    Output,
    errors_path,
    real_path,
    require_output,
    require_run_output,
    results_path,
)
from omlx_producer.bulk.row import BadRow, Row, RowResult, read_line, write_line
from omlx_producer.bulk.store import Store, read_settings, run_path
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
    rows = [each.row for each in (ok("a"), failed("b"), bad(3), ok("c"))]
    assert [store.see(each) for each in rows if isinstance(each, Row | BadRow)] == [
        (row("a").digest, None, "", None),
        (None, row("b").digest, "failed", None),
        (None, bad(3).row.digest, "unparsable", None),
        (None, None, "", None),
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
        assert [store.see(row(name)).done for name in names] == [row(name).digest for name in names]
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
            Store(run_path(output))


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


def test_the_figures_of_an_output_are_those_of_all_its_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), ok("b", ends=["length"]), failed("c")).close()
    with contextlib.closing(write(out, ok("d"))) as store:
        assert store.totals() == (3, 1, 1, 0, 3, 6)


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
        for again in (lambda: Output.open(out).__enter__(), lambda: read_settings(out)):
            with pytest.raises(InvalidRequest, match="run: another command is writing it; wait"):
                again()
    with Output.open(out) as second:
        assert second.store.run == first.store.run
    assert read_settings(out) == {"input": "x"}
    assert read_settings(tmp_path / "other.jsonl") is None


def test_what_another_version_wrote_is_told(tmp_path: Path) -> None:
    of_json, newer = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run_path(of_json).write_text('{"run": "0123456789ab", "settings": null}\n' * 20)
    write(newer).close()
    with contextlib.closing(Store(run_path(newer))) as store:
        store._run("PRAGMA user_version = 99")
    for out in (of_json, newer):
        with pytest.raises(
            InvalidRequest, match="run: another version of omlx-submit wrote it; us"
        ):
            Output.open(out).__enter__()


@pytest.mark.parametrize("changed", ["kept\n", "kept" * 999])
def test_an_output_that_something_else_has_changed_is_kept_as_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), ok("b"), failed("c")).close()
    out.write_text(changed)
    write(out, ok("d"), finish=True).close()
    assert ids(out) == ["a", "b", "d"]
    assert (tmp_path / "out.jsonl.1").read_text() == changed
    assert capsys.readouterr().err == (
        f"{out}: something else has changed it; its copy is {out}.1\n"
    )


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_an_output_that_is_gone_is_written_again(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    write(out, ok("a"), failed("b")).close()
    results = results_path(out)
    results.unlink()
    write(out).close()
    assert ids(results) == ["a"]
    assert f"{results}: written again, for its lines are in {out}.run; to start" in (
        capsys.readouterr().err
    )


def in_child(work: Callable[[], object]) -> int:
    """Run something in a process of its own; returns its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)


STEPS = [
    pytest.param(store_module, "write_line", id="in the transaction"),
    pytest.param(LinesFile, "append", id="before the lines"),
    pytest.param(output_module, "write_table", id="before the table"),
    pytest.param(Store, "_run", id="at any statement", marks=pytest.mark.slow),
    pytest.param(output_module, "sync_file", id="at the end", marks=pytest.mark.slow),
    pytest.param(durable, "sync_file", id="in a draft", marks=pytest.mark.slow),
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
                if each.row.digest not in (known.done, known.failed):
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


def test_a_full_disk_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"

    class Full:
        """A file on a disk that is full."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def flush(self) -> None:
            self._stream.seek(0, os.SEEK_END)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        with Output.open(out) as output:
            output.commit([ok("a")])
            results = output._files["results"]
            results._stream = Full(results._stream)  # type: ignore[assignment]
            output.commit([ok("b")])

    with pytest.raises(OSError, match="No space left") as caught:
        run()
    assert caught.value.filename == str(out)
    # Its lock is gone with it.
    write(out, ok("c")).close()
    assert ids(out) == ["a", "b", "c"]


def test_a_disk_that_is_full_at_the_end_leaves_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(out, ok("b", 2)).close()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_file", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(out, ok("a", 1), finish=True, ordered=True)
    assert caught.value.filename == str(out)
    assert ids(out) == ["b", "a"]
    write(out, finish=True, ordered=True).close()
    assert ids(out) == ["a", "b"]


def test_a_full_disk_takes_no_part_of_a_transaction(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a")).close()

    def run() -> None:
        with Output.open(out) as output:
            output.store._run("PRAGMA max_page_count = 10")
            output.commit([ok(f"b{n}") for n in range(1000)])

    with pytest.raises(OSError, match="full") as caught:
        run()
    assert caught.value.filename == f"{out}.run"
    write(out, ok("c")).close()
    assert ids(out) == ["a", "c"]


def test_a_full_folder_of_temporary_files_is_an_error_of_a_file() -> None:
    with contextlib.closing(Store()) as store:
        store._run("PRAGMA temp.max_page_count = 10")
        with pytest.raises(OSError, match="full") as caught:
            [store.see(row(f"row {number}")) for number in range(1000)]
        assert "TMPDIR" in caught.value.filename
