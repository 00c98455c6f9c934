"""Pictures as rows: folders, columns of paths, bytes in Parquet, pages of PDFs, files of texts."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.input import Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.errors import InvalidRequest
from tests.helpers.bulk_runs import errors, ids, lines, wait_for_model, write_jsonl
from tests.helpers.fake_worker import announce
from tests.helpers.image_parts import grey
from tests.helpers.workers import ALIAS, running_worker
from tests.integration.producer.bulk.conftest import Run

JPEG = b"\xff\xd8\xff\xe0 a picture"
QUIET = ("--progress", "none")
ASK = ("--template", "What is it?", *QUIET)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def worker(redis_url: str, connection: redis.Redis) -> Iterator[None]:
    with running_worker(redis_url):
        wait_for_model(connection)
        yield


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_csv(path: Path, *rows: tuple[str, ...]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def write_pdf(path: Path, *sizes: tuple[int, int]) -> None:
    """A PDF of empty pages of these sizes, in points."""
    pdfium = pytest.importorskip("pypdfium2")
    document = pdfium.PdfDocument.new()
    for size in sizes:
        document.new_page(*size)
    document.save(path)
    document.close()


def rows_of(name: str, **asked: Any) -> Iterator[Any]:
    """The rows that a run of an input has, each made when it is asked for."""
    options = RunOptions.of(name, {"require_known_model": False, "model": "m", **asked})
    with Input.open(options, {}) as source:
        yield from source.all_rows()


def picture_of(row: Any) -> bytes:
    """The only picture of a row."""
    (picture,) = row.request.pictures.values()
    return bytes(picture)


def reasons(output: Path) -> dict[str, str]:
    return {each["custom_id"]: each["error"]["message"] for each in errors(output)}


@pytest.mark.usefixtures("worker")
def test_a_folder_is_a_row_for_each_picture_in_the_order_of_their_paths(
    run: Run, tmp_path: Path
) -> None:
    good = {"b.png": grey(shade=1), "sub/a.JPG": JPEG, "c.webp": b"RIFF....WEBP"}
    bad = {"empty.gif": b"", "text.png": b"hello"}
    others = {"n.txt": b"x", "IMG.HEIC": b"x", "._b.png": b"x", ".thumbs/b.png": b"x"}
    fill(tmp_path / "scans", good | bad | others)
    (tmp_path / "scans/round").symlink_to(tmp_path / "scans")
    done = run("run", "scans", "-o", "out.csv", "--ordered", *ASK)
    assert done.exit_code == 1
    assert "3 files left out, no picture or PDF by name: 1 .heic, 1 .txt, 1 round" in done.stderr
    assert ids(tmp_path / "out.csv.jsonl") == ["b.png", "c.webp", "sub/a.JPG"]
    assert reasons(tmp_path / "out.csv") == {
        "empty.gif": "line 3, id 'empty.gif': path: got 'empty.gif', which is empty; give a whole "
        "picture",
        "text.png": "line 5, id 'text.png': path: got 'text.png', which is no png, jpeg, webp, "
        "tiff or gif by its first bytes; convert it",
    }
    assert "base64" not in (tmp_path / "out.csv").read_text()


def test_the_instruction_comes_before_the_picture_whose_type_its_first_bytes_tell(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "scans", {"a.png": JPEG})
    (row,) = rows_of("scans", template="Read {path}.", system="Be brief.")
    url = "data:image/jpeg;base64,/9j/4CBhIHBpY3R1cmU="
    assert row.request.to_wire()["messages"] == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Read a.png."},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        },
    ]


def test_a_picture_is_read_when_its_row_is_made(tmp_path: Path) -> None:
    fill(tmp_path / "scans", {"a.png": grey(shade=1), "b.png": grey(shade=2)})
    made = rows_of("scans", template="What is it?")
    assert picture_of(next(made)) == grey(shade=1)
    fill(tmp_path / "scans", {"b.png": grey(shade=3)})
    assert picture_of(next(made)) == grey(shade=3)


@pytest.mark.usefixtures("worker")
def test_the_same_command_goes_on_and_runs_what_was_added_or_edited(
    run: Run, tmp_path: Path
) -> None:
    out, command = tmp_path / "out.jsonl", ("run", "scans", "-o", "out.jsonl", *ASK)
    fill(tmp_path / "scans", {"a.png": grey(shade=1), "b.png": grey(shade=2), "c.png": b""})
    assert run(*command, "--limit", "1").exit_code == 0
    assert ids(out) == ["a.png"]
    assert run(*command).exit_code == 1
    before = {line["custom_id"]: line["id"] for line in lines(out)}
    fill(tmp_path / "scans", {"c.png": grey(shade=4)})
    assert run("retry", "out.jsonl", *QUIET).exit_code == 0
    fill(tmp_path / "scans", {"A.png": grey(shade=5), "a.png": grey(shade=3)})
    assert run(*command).exit_code == 0
    after = {line["custom_id"]: line["id"] for line in lines(out)}
    assert after.keys() == {"A.png", "a.png", "b.png", "c.png"}
    assert [after["b.png"] == before["b.png"], after["a.png"] == before["a.png"]] == [True, False]
    assert errors(out) == []


@pytest.mark.usefixtures("worker")
def test_a_folder_may_be_left_to_the_workers(run: Run, connection: redis.Redis) -> None:
    fill(Path("scans"), {"a.png": grey(shade=1), "b.png": b""})
    batch = Batch(connection, run("run", "scans", "--detach", *ASK).stdout.strip())
    done = run("results", batch.id, "-o", "out.csv", "--wait")
    assert done.exit_code == 1, done.stderr
    assert [row["custom_id"] for row in read_csv(Path("out.csv"))] == ["a.png", "b.png"]


@pytest.mark.usefixtures("worker")
def test_a_column_names_pictures_beside_the_input(run: Run, tmp_path: Path) -> None:
    fill(tmp_path / "in", {"scans/a.png": grey(shade=1), "b.jpg": JPEG})
    write_csv(
        tmp_path / "in/rows.csv",
        ("photo", "what"),
        ("scans/a.png", "red"),
        (str(tmp_path / "in/b.jpg"), "blue"),
        ("none.png", "x"),
        ("https://example.org/a.png", "x"),
    )
    command = ("run", "in/rows.csv", "-o", "out.csv", "--image", "photo", "--keep", *QUIET)
    assert run(*command, "--template", "Is it {what}?").exit_code == 1
    table = read_csv(tmp_path / "out.csv")
    assert [(row["what"], bool(row["text"])) for row in table] == [
        ("red", True),
        ("blue", True),
        ("x", False),
        ("x", False),
    ]
    assert reasons(tmp_path / "out.csv") == {
        "row-4": "line 4: photo: got 'none.png', which is no file; correct the path",
        "row-5": "line 5: photo: got 'https://example.org/a.png', which is no path; save it in a "
        "file: none is fetched",
    }


def test_objects_with_prompts_of_their_own_have_pictures_too(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": grey()})
    write_jsonl(
        tmp_path / "rows.jsonl",
        [
            {"id": "a", "prompt": "What is it?", "image": "a.png", "max_tokens": 5},
            {"id": "b", "prompt": [1, 2], "image": "a.png"},
            {"id": "c", "messages": [{"role": "user", "content": "hi"}], "image": "a.png"},
        ],
    )
    good, *bad = rows_of("rows.jsonl", image="image")
    assert (picture_of(good), good.request.max_completion_tokens) == (grey(), 5)
    assert [row.reason.partition("': ")[2] for row in bad] == [
        "prompt: got tokens beside a picture; give text",
        "messages: given beside a picture; write it in them, or give a template",
    ]


@pytest.mark.usefixtures("worker")
def test_a_parquet_column_holds_bytes_or_names_files_and_no_table_gets_the_bytes(
    run: Run, tmp_path: Path
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [
        {"bytes": grey(shade=1), "path": "here/a.png"},
        {"bytes": None, "path": "b.png"},
        {"bytes": b"hello", "path": "c.png"},
        {"bytes": b"", "path": None},
    ]
    fill(tmp_path, {"b.png": grey(shade=2)})
    rows = [{"image": image, "thumb": grey()} for image in images]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    made = list(rows_of("rows.parquet", image="image", template="Hi", id_field="image"))
    assert [picture_of(row) for row in made[:2]] == [grey(shade=1), grey(shade=2)]
    assert [row.custom_id for row in made] == ["here/a.png", "b.png", "c.png", None]
    command = ("run", "rows.parquet", "-o", "out.parquet", "--image", "image", "--keep", *ASK)
    assert run(*command).exit_code == 1
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["image"] for row in table] == ["here/a.png", "b.png", "c.png", None]
    assert {row["thumb"] for row in table} == {None}
    assert [
        reason.partition("which ")[2] for reason in reasons(tmp_path / "out.parquet").values()
    ] == [
        "is no png, jpeg, webp, tiff or gif by its first bytes; convert it",
        "is empty; give a whole picture",
    ]


def test_each_page_of_a_pdf_is_a_row(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    fill(tmp_path / "scans", {"a.png": grey(), "broken.pdf": b"%PDF-1.7 nonsense"})
    write_pdf(tmp_path / "scans/Two.PDF", (72, 36), (36, 72))
    first, second, plain, broken = rows_of("scans", template="Read it.")
    assert [row.custom_id for row in (first, second, plain)] == ["Two.PDF#1", "Two.PDF#2", "a.png"]
    (tmp_path / "page").write_bytes(picture_of(second))
    with Image.open(tmp_path / "page") as page:
        assert page.size == (100, 200)
    assert broken.reason == (
        "line 4, id 'broken.pdf': path: got 'broken.pdf', which is no whole PDF, or needs a "
        "password; save it anew"
    )
    (row, _) = rows_of("scans/Two.PDF", template="Read it.")
    assert (row.custom_id, picture_of(row)) == ("Two.PDF#1", picture_of(first))


def test_a_column_names_a_page_of_a_pdf_with_several(tmp_path: Path) -> None:
    write_pdf(tmp_path / "two.pdf", (9, 9), (9, 9))
    write_pdf(tmp_path / "one.pdf", (9, 9))
    names = ("two.pdf#2", "one.pdf", "two.pdf", "two.pdf#3")
    write_csv(tmp_path / "rows.csv", ("prompt", "scan"), *(("Read it.", name) for name in names))
    page, only, *bad = rows_of("rows.csv", image="scan")
    assert picture_of(page) == picture_of(only)
    assert [row.reason.partition("which ")[2] for row in bad] == [
        "has 2 pages; give one of them, as in two.pdf#2"
    ] * 2


def test_pdfs_of_a_folder_need_a_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "scans", {"a.png": grey(), "b.pdf": b"%PDF-"})
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    done = run("run", "scans", "-o", "out.csv", *ASK)
    needs = "b.pdf needs pypdfium2, which is not installed; pip install 'omlx-queue[pdf]'"
    assert (done.exit_code, done.stderr) == (2, f"omlx-submit: {needs}\n")


@pytest.mark.usefixtures("worker")
def test_a_text_file_for_each_row_is_named_after_its_picture(run: Run, tmp_path: Path) -> None:
    names = ("a.png", "sub/b.jpg", "same.png", "same.gif")
    fill(tmp_path / "scans", dict.fromkeys(names, JPEG) | {"bad.png": b""})
    write_pdf(tmp_path / "scans/doc.pdf", (9, 9))
    command = ("run", "scans", "-o", "out.csv", "--each", "texts/deep", *ASK)
    done = run(*command)
    assert done.exit_code == 1
    assert '"texts/deep": 5}' in run(*command, "--progress", "ndjson").stderr
    texts = {row["custom_id"]: row["text"] for row in read_csv(tmp_path / "out.csv")}
    folder = tmp_path / "texts/deep"
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")]
    assert {name: (folder / name).read_text() for name in found} == {
        "a.txt": texts["a.png"],
        "sub/b.txt": texts["sub/b.jpg"],
        "same.png.txt": texts["same.png"],
        "same.gif.txt": texts["same.gif"],
        "doc#1.txt": texts["doc.pdf#1"],
    }
    refused = run("run", "scans", "-o", "other.csv", "--each", "texts", *ASK)
    assert refused.exit_code == 2
    assert f"--each: {tmp_path}/texts/deep/" in refused.stderr
    assert ".txt is of no run of omlx-submit; give another folder" in refused.stderr


@pytest.mark.usefixtures("worker")
def test_no_id_leads_out_of_the_folder_of_texts(run: Run, tmp_path: Path) -> None:
    ids = ("../up", "/etc/x", "a//b", ".", "..")
    write_jsonl(tmp_path / "rows.jsonl", [{"id": name, "prompt": "hi"} for name in ids])
    assert run("run", "rows.jsonl", "-o", "out.jsonl", "--each", "texts", *QUIET).exit_code == 0
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt"))
    assert written == [
        "texts/%/etc/x.txt",
        "texts/%2E%2E.txt",
        "texts/%2E%2E/up.txt",
        "texts/%2E.txt",
        "texts/a/%/b.txt",
    ]


def test_a_dry_run_counts_pictures_as_the_most_that_they_take(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    announce(connection, ALIAS, picture_tokens=64)
    fill(tmp_path / "scans", {"a.png": grey(), "b.png": grey(), "c.png": b""})
    done = run("run", "scans", "--template", "Read it!", "--dry-run")
    assert "pictures: 2, at most 64 tokens each\n" in done.stderr
    found = json.loads(done.stdout)
    assert (found["prompt_tokens"], found["prompt_tokens_exact"]) == (2 * (2 + 64), False)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("scans",), "--template: missing; say what to do with each picture"),
        (("scans", "--image", "path", *ASK), "--image: the input is pictures alone; leave it out"),
        (("scans", "--raw", *ASK), "--raw: pictures go into chats; leave it out"),
        (("scans", "--keep", *ASK), "--keep: pictures have no columns to add; leave it out"),
        (("scans", "--format", "csv", *ASK), "scans: is no regular file"),
        (("texts", *ASK), "texts: holds no pictures; give a folder that has png, jpg"),
        (("rows.csv", "--image", "scan"), "--image: got 'scan', a column that the input lacks"),
        (("rows.csv", "--image", "photo"), "--empty: missing, and 1 row has an empty {photo}"),
        (("rows.txt", "--image", "photo"), "--image: a text input has no columns"),
        (("batch.jsonl", "--image", "photo"), "--image: OpenAI Batch lines have their own"),
        (("scans", "--prompt", "What is it?"), "--prompt: no such option; use --template"),
        (("scans", "--each", "rows.csv", *ASK), "rows.csv', which is no folder; give another"),
    ],
)
def test_what_cannot_go_with_pictures_is_told_before_anything_runs(
    run: Run, tmp_path: Path, args: tuple[str, ...], reason: str
) -> None:
    fill(tmp_path, {"scans/a.png": grey(), "texts/a.md": b"x", "rows.txt": b"hi\n"})
    write_csv(tmp_path / "rows.csv", ("prompt", "photo"), ("hi", "scans/a.png"), ("hi", " "))
    write_jsonl(tmp_path / "batch.jsonl", [{"custom_id": "a", "body": {}, "photo": "a.png"}])
    done = run("run", *args, "-o", "out.csv")
    assert done.exit_code == 2
    assert reason in done.stderr


def test_a_model_that_takes_no_pictures_is_told_once(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    announce(connection, ALIAS)
    fill(tmp_path / "scans", {"a.png": grey(), "b.png": grey()})
    done = run("run", "scans", "-o", "out.csv", *ASK)
    assert done.exit_code == 2
    assert done.stderr.count(f"{ALIAS} takes no pictures") == 1


def test_a_row_with_an_empty_cell_runs_without_a_picture_if_asked(tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", ("prompt", "photo"), ("hi", ""))
    (row,) = rows_of("rows.csv", image="photo", empty="run")
    assert not row.request.pictures
    (bad,) = rows_of("rows.csv", image="photo", empty="fail")
    assert bad.reason == "line 2: photo: empty; give the path of a picture"


@pytest.mark.usefixtures("worker")
def test_pictures_may_come_from_memory(redis_url: str, tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": grey(shade=1)})
    asked: Any = {"template": "What is it?", "image": "photo", "ordered": True, "seed": 1}
    with Producer(redis_url) as producer:
        results = list(producer.run([{"photo": "a.png"}, {"photo": grey(shade=1)}], **asked))
        assert results[0].text == results[1].text
        assert producer.run("a.png", "out.jsonl", template="What is it?", each="texts") == {}
        assert (tmp_path / "texts/a.txt").exists()
        with pytest.raises(InvalidRequest, match="each: goes with an output"):
            producer.run("a.png", template="What is it?", each="texts")
