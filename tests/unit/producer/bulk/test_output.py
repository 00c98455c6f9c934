"""The files of a run: repaired, appended to, counted once, rewritten."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer import InvalidRequest
from omlx_producer.bulk import journal as journal_module
from omlx_producer.bulk.journal import Journal, replacing
from omlx_producer.bulk.output import OutputFiles, errors_path, real_path, require_output
from omlx_producer.bulk.plan import RowIndex
from omlx_producer.bulk.row import BadRow, Row, RowResult, digest_of, read_line, write_line
from omlx_producer.bulk.runfile import RunFile, read_settings, run_path
from omlx_producer.client.outcome import Outcome
from omlx_producer.wire import GenerationRequest
from tests.helpers.bulk_runs import errors, ids, lines


def body(text: str = "text") -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }


def row(custom_id: str, line: int = 1, prompt: str = "p") -> Row:
    request = GenerationRequest(model="m", prompt=prompt)
    return Row(custom_id, line, request, digest_of(custom_id, request.to_wire()))


def ok(custom_id: str, line: int = 1, prompt: str = "p") -> RowResult:
    return RowResult(row(custom_id, line, prompt), "bulk-1-1", body=body(f"text of {custom_id}"))


def failed(custom_id: str, line: int = 1) -> RowResult:
    return RowResult(row(custom_id, line), "bulk-1-1", code="failed", reason="out of memory")


def bad(line: int, custom_id: str | None = None) -> RowResult:
    row_ = BadRow(line, custom_id, "unparsable", f"line {line}: not JSON", f"{line:024x}", False)
    return RowResult(row_, "", code=row_.code, reason=row_.reason)


def write(path: Path, *results: RowResult, finish: bool = False, **how: Any) -> RowIndex:
    index = RowIndex()
    files = OutputFiles(path, index)
    for result in results:
        index.see(result.row.key, result.row.line)
    files.commit(results)
    if finish:
        files.finish(**{"ordered": False} | how)
    files.close()
    return index


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


@given(st.integers(min_value=0, max_value=10_000))
def test_a_line_torn_anywhere_is_cut_off_and_all_others_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "out.jsonl"
    whole = [write_line(ok(f"r{n}")) for n in range(4)]
    data = b"".join(whole)
    cut = min(cut, len(data))
    path.write_bytes(data[:cut])
    journal = Journal(path)
    kept = [line for _, line in journal.lines()]
    journal.append(whole[0])
    journal.close()
    complete = data[:cut].count(b"\n")
    # A line that lacks its line end alone is whole.
    complete += any(cut == sum(map(len, whole[: n + 1])) - 1 for n in range(4))
    assert kept == whole[:complete]
    assert path.read_bytes() == b"".join(whole[:complete]) + whole[0]


def test_a_torn_line_longer_than_a_block_is_cut_off_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "TAIL_BYTES", 7)
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 100)
    journal = Journal(path)
    journal.close()
    assert journal.torn == 107
    assert path.read_bytes() == b'{"a": 1}\n'


def test_earlier_results_are_known_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), failed("b"), bad(3)).close()
    index = write(out)
    known = [index.known(r.row.key) for r in (ok("a"), failed("b"), bad(3), ok("c"))]
    assert known == [
        (row("a").digest, None, ""),
        (None, row("b").digest, "failed"),
        (None, bad(3).row.digest, "unparsable"),
        (None, None, ""),
    ]
    index.close()


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


@pytest.mark.parametrize("ordered", [False, True])
def test_lines_of_something_else_in_an_output_are_told_and_stay(
    tmp_path: Path, ordered: bool
) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ok("a"), ok("b", prompt="before"), failed("c")).close()
    with out.open("a") as stream:
        stream.write('{"precious": 1}\n\n')
    index = RowIndex()
    files = OutputFiles(out, index)
    assert [line.number for line in files.foreign[out]] == [3, 4]
    files.commit([ok("b")])
    files.finish(ordered=ordered)
    index.close()
    *ours, precious, blank = out.read_text().splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in ours) == ["a", "b"]
    assert (precious, blank) == ('{"precious": 1}', "")
    # Foreign lines alone are no reason to write the file again.
    before = out.stat().st_ino
    write(out, finish=True).close()
    assert out.stat().st_ino == before


def test_bad_lines_that_the_input_no_longer_has_leave_the_errors(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, bad(3), bad(4)).close()
    index = RowIndex()
    files = OutputFiles(out, index)
    index.see(bad(4).row.key, 4)
    files.finish(ordered=False)
    files.close()
    index.close()
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


@pytest.mark.parametrize("precious", ['{"precious": 1}\n', "no line end", "a\nb\n"])
def test_a_file_of_something_else_is_no_output(tmp_path: Path, precious: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(precious)
    with pytest.raises(InvalidRequest, match="holds no results of omlx-submit; give another"):
        require_output(out)


@pytest.mark.parametrize(
    "line_id",
    [
        "batch_req_wnaDys",
        "batch_req_67c5e1b2a4d48190b5c4d1e2f3a4b5c6",
        "batch_req_67C5E1B2A4D48190B5C4D1E2",
    ],
)
def test_results_of_openai_are_not_taken_for_ours(tmp_path: Path, line_id: str) -> None:
    line = json.dumps({"id": line_id, "custom_id": "a", "response": body(), "error": None})
    assert read_line(line.encode()) is None
    out = tmp_path / "out.jsonl"
    for precious in (f"{line}\n", line, line[: len('{"id": "') + len(line_id)] + "\n"):
        out.write_text(precious)
        with pytest.raises(InvalidRequest, match="holds no results of omlx-submit"):
            require_output(out)


def test_a_run_killed_in_its_very_first_line_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for torn in ("", '{"i', '{"id": "batch_req_12'):
        out.write_text(torn)
        require_output(out)
        write(out, ok("a")).close()
        assert ids(out) == ["a"]


def test_lines_say_which_version_of_which_row_they_are() -> None:
    for result in (ok("a"), failed("a"), bad(3), bad(3, "a")):
        written = read_line(write_line(result))
        assert written is not None
        assert (written.key, written.digest) == (result.row.key, result.row.digest)
        assert written.ok == result.ok
    assert read_line(b'{"custom_id": "a"}') is None
    assert read_line(b"[1]") is None
    assert read_line(b"nonsense") is None


def test_a_custom_id_may_be_any_text(tmp_path: Path) -> None:
    names = ["ünï", "\u2028", '"', "x" * 512]
    index = write(tmp_path / "out.jsonl", *(ok(name) for name in names))
    index.close()
    index = write(tmp_path / "out.jsonl")
    assert all(index.known(ok(name).row.key) for name in names)
    index.close()


def test_an_output_is_valid_utf_8_whatever_a_reason_quotes(tmp_path: Path) -> None:
    strange = RowResult(row("a"), "bulk-1-1", code="failed", reason="got \ud800")
    line = write_line(strange)
    assert json.loads(line.decode("utf-8"))["error"]["message"] == "got \ud800"


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_a_link_to_an_output_is_no_second_output(tmp_path: Path, make: Any) -> None:
    out, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    out.touch()
    make(link, out)
    index = RowIndex()
    files = OutputFiles(out, index)
    with pytest.raises(InvalidRequest, match=r"link.jsonl: another omlx-submit is writ"):
        OutputFiles(link, index)
    files.close()
    OutputFiles(link, index).close()
    index.close()


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


def test_the_run_file_of_a_private_output_is_private(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch(0o600)
    with RunFile.open(out):
        pass
    assert stat.S_IMODE(run_path(out).stat().st_mode) == 0o600


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
    ]


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
    refused = RowResult.of_job(row("c"), Outcome("bulk-1-1", "failed", code="invalid_request"))
    out = tmp_path / "out.jsonl"
    expected = {"failed": 1, "invalid_request": 1, "unparsable": 1}
    for results in ([ok("a"), failed("b"), refused, bad(4)], []):
        with contextlib.closing(write(out, *results)) as index:
            assert index.failures() == expected


def test_the_figures_of_an_output_are_those_of_all_its_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cut = ok("b")
    assert cut.body
    cut.body["choices"][0]["finish_reason"] = "length"
    write(out, ok("a"), cut, failed("c")).close()
    with contextlib.closing(write(out, ok("d"))) as index:
        assert index.totals() == (3, 1, 1, 0, 3, 6)


def test_a_body_that_is_no_response_is_a_failure() -> None:
    for finished in ({"text": "of another tool"}, body() | {"usage": {}}, None):
        result = RowResult.of_job(row("a"), Outcome("bulk-1-1", "finished", body=finished))
        assert (result.ok, result.code) == (False, "no_response")
        assert "is not that of a generation job" in result.reason


def test_a_full_folder_of_temporary_files_is_an_error_of_a_file() -> None:
    index = RowIndex()
    index._database.execute("PRAGMA max_page_count = 10")

    def fill() -> None:
        for number in range(10_000):
            index.see(f"id:{number}", number)

    with pytest.raises(OSError, match="full") as caught:
        fill()
    assert "TMPDIR" in caught.value.filename
    index.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda index: index.see("id:a", 1),
        lambda index: index.known("id:a"),
        lambda index: index.record(ok("a").written, 0),
        lambda index: index.forget_absent_lines(),
        lambda index: index.forget_error("id:a"),
        lambda index: index.failures(),
        lambda index: index.totals(),
        lambda index: list(index.places(in_input_order=True)),
    ],
    ids=[
        *("see", "known", "record", "forget_absent_lines", "forget_error", "failures", "totals"),
        "places",
    ],
)
def test_a_broken_index_is_an_error_of_a_file(use: Callable[[RowIndex], Any]) -> None:
    with contextlib.closing(RowIndex()) as index:
        index._database.execute("DROP TABLE rows")
        with pytest.raises(OSError, match="no such table"):
            use(index)


def test_a_full_disk_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, index = tmp_path / "out.jsonl", RowIndex()
    files = OutputFiles(out, index)
    files.commit([ok("a")])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync_file", full)
        with pytest.raises(OSError, match="No space left") as caught:
            files.commit([ok("b")])
        assert caught.value.filename == str(out)
        with pytest.raises(OSError, match="No space left"):
            files.close()
    index.close()
    # Its lock is gone with it.
    write(out, ok("b")).close()
    assert set(ids(out)) == {"a", "b"}


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with RunFile.open(out) as first:
        first.settings = {"input": "x"}
        first.save()
        with pytest.raises(InvalidRequest, match="another omlx-submit is writing it"):
            RunFile.open(out).__enter__()
    with RunFile.open(out) as again:
        assert again.run == first.run
        assert again.settings == {"input": "x"}
    assert read_settings(out) == {"input": "x"}
    assert read_settings(tmp_path / "other.jsonl") is None


@pytest.mark.parametrize("step", ["write", "flush", "truncate"])
@pytest.mark.parametrize("source", ["x", "x" * 1000], ids=["shorter", "longer"])
def test_a_kill_while_a_run_file_is_saved_keeps_the_run(
    tmp_path: Path, step: str, source: str
) -> None:
    class Killed:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            if name == step:
                raise KeyboardInterrupt
            return getattr(self._stream, name)

    out = tmp_path / "out.jsonl"
    with RunFile.open(out) as first:
        first.remember({"input": "y" * 500})
    with RunFile.open(out) as killed:
        killed._stream = Killed(killed._stream)
        with pytest.raises(KeyboardInterrupt):
            killed.remember({"input": source})
    with RunFile.open(out) as again:
        assert again.run == first.run
        assert again.settings["input"] in (source, "y" * 500)


def test_a_run_file_torn_by_a_power_cut_starts_a_new_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.run").write_text('{"run": "ab')
    with RunFile.open(out) as run_file:
        assert len(run_file.run) == 12
