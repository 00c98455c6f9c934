"""The scheduler: who waits for whom."""

from __future__ import annotations

import pytest

from omlx_worker.decode.scheduler import GATHERING
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import BULK, DEFAULT, HIGH, Row
from tests.helpers.scheduling import Rows


def test_without_rows_there_is_nothing_to_do() -> None:
    assert Rows().told() == ["idle"]


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    rows = Rows()
    rows.add("a", 20)
    assert rows.told(5) == ["join a", "read 8 of a", "read 8 of a", "read 4 of a", "decode"]


def test_rows_of_one_level_with_prompts_of_like_length_are_read_together() -> None:
    rows = Rows(8, chunk=16)
    for name, tokens in {"a": 4, "long": 9, "b": 3, "c": 4, "d": 4, "e": 4}.items():
        rows.add(name, tokens)
    assert rows.told(6) == ["join a", "join long", "join b", "join c", "join d", "join e"]
    assert rows.told(3) == ["read 4 of a, 4 of c, 4 of d, 4 of e", "decode", "read 3 of b"]


def test_an_engine_that_does_not_pad_reads_only_prompts_of_one_length_together() -> None:
    rows = Rows(8, chunk=16, pads=False)
    for name, tokens in {"a": 4, "b": 3, "c": 4}.items():
        rows.add(name, tokens)
    assert rows.told(3) == ["join a", "join b", "join c"]
    assert rows.told(3) == ["read 4 of a, 4 of c", "decode", "read 3 of b"]


def test_rows_join_only_until_they_fill_a_chunk_and_never_beside_more_urgent_ones() -> None:
    rows = Rows(8, chunk=5)
    for name in "abcd":
        rows.add(name, 4)
    assert rows.told(4) == ["join a", "join b", "read 4 of a", "decode"]
    rows.told(3)
    rows.add("high", 6, HIGH)
    assert rows.told(5) == ["join high", "read 5 of high", "decode", "read 1 of high", "decode"]


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_at_most() -> None:
    rows = Rows(8)
    rows.add("running", 1)
    rows.told(3)
    for name in ("long", "longer"):
        rows.add(name, 600 + len(name))
    assert rows.told(2) == ["join long", "read 8 of long"]
    rows.add("letter", 1)
    rows.add("word", 2)
    told = ["decode", "join letter", "join word", "read 8 of long", "decode"]
    assert rows.told(6) == [*told, "read 1 of letter, 2 of word"]


def test_a_long_prompt_gets_every_other_chunk_of_a_stream_of_short_ones() -> None:
    rows = Rows(8)
    rows.add("long", 80)
    read = []
    for arrival in range(12):
        rows.add(f"short-{arrival}", 4)
        while not (told := rows.told()[0]).startswith("read"):
            pass
        read.append(told)
        for row in rows.scheduler.decoding:
            rows.scheduler.remove(row)
    assert read.count("read 8 of long") == 6


@pytest.mark.parametrize(("level", "steps"), [(BULK, GATHERING), (DEFAULT, 0)])
def test_a_half_empty_chunk_of_bulk_rows_waits_some_steps_for_others(
    level: int, steps: int
) -> None:
    rows = Rows.filled(level, places=8)
    rows.add("a", 2, level)
    assert rows.told(steps + 3) == ["join a", *["decode"] * steps, "read 2 of a", "decode"]


def test_a_half_empty_chunk_with_a_picture_waits_for_others_once() -> None:
    rows = Rows.filled(BULK, places=8)
    rows.add("a", 2, BULK, pictures=[Picture(0, 1, 1, b"")])
    waited = ["join a", *["decode"] * GATHERING]
    assert rows.told(GATHERING + 5) == [*waited, "look for a", "decode", "read 2 of a", "decode"]


def test_a_chunk_of_bulk_rows_waits_for_none_while_others_are_to_be_read_after_it() -> None:
    rows = Rows.filled(BULK, places=8)
    for name, tokens in {"a": 2, "long": 40}.items():
        rows.add(name, tokens, BULK)
    assert rows.told(3) == ["join a", "join long", "read 2 of a"]


def test_a_row_that_begins_as_another_waits_until_that_beginning_is_kept() -> None:
    rows = Rows(8, chunk=100, shares=True)
    beginning = list(range(70))
    rows.add("first", [*beginning, *[1] * 30])
    rows.add("second", [*beginning, *[2] * 20])
    rows.held["second"] = 70
    rows.add("other", 5)
    assert rows.told(5) == [
        "join first",
        "join other",
        "read 70 of first",
        "join second",
        "read 5 of other, 19 of second, 29 of first",
    ]
    assert rows.rows["second"].cached == 70


def test_no_row_waits_for_a_beginning_that_a_less_urgent_row_is_kept_from_reading() -> None:
    rows = Rows(8, shares=True)
    beginning = list(range(200))
    rows.add("bulk", [*beginning, 1], BULK)
    assert rows.told(2) == ["join bulk", "read 8 of bulk"]
    rows.add("high", [*beginning, 2], HIGH)
    assert rows.told(2) == ["read 8 of bulk", "read 8 of bulk"]
    rows.add("other", 100, HIGH)
    assert rows.told(5) == [
        *("join other", "join high", "read 8 of other", "read 8 of high", "read 8 of other")
    ]


def test_a_row_that_does_not_want_the_cache_waits_for_nobody() -> None:
    rows = Rows(8, chunk=100, shares=True)
    rows.add("first", list(range(90)))
    rows.add("second", list(range(90)), cache=False)
    assert rows.told(2) == ["join first", "join second"]


def test_a_running_row_waits_for_one_chunk_at_most() -> None:
    rows = Rows()
    rows.add("a", 1)
    rows.told(3)
    rows.add("b", 24)
    kinds = [told.partition(" ")[0] for told in rows.told(7)]
    assert kinds == ["join", *["read", "decode"] * 3]


def test_a_picture_is_looked_at_before_its_chunk_with_a_step_between() -> None:
    rows = Rows()
    rows.add("decodes", 1)
    rows.told(3)
    places = [(10, 2), (12, 2), (20, 1)]
    pictures = [Picture(start, 1, count, b"%d" % start) for start, count in places]
    rows.add("pictures", 22, pictures=pictures)
    read, look = "read {} of pictures".format, "look for pictures"
    acts = ["join pictures", read(8), look, look, read(8), look, read(6)]
    assert rows.told(14) == [
        acts[0],
        *(act for each in acts[1:] for act in (each, "decode")),
        "decode",
    ]


def test_a_chunk_ends_in_no_picture_whose_tokens_see_one_another() -> None:
    rows = Rows()
    pictures = [Picture(5, 1, 6, b"whole", both_ways=True), Picture(14, 1, 6, b"cut")]
    rows.add("pictures", 22, pictures=pictures)
    told = [each for each in rows.told(7) if not each.startswith("look")]
    assert told == ["join pictures", *(f"read {n} of pictures" for n in (11, 8, 3)), "decode"]


def test_what_the_prefix_cache_holds_of_pictures_is_not_looked_at() -> None:
    rows = Rows(chunk=100)
    rows.held["pictures"] = 12
    places = [(2, 8), (11, 8), (20, 1)]
    pictures = [Picture(start, 1, count, b"%d" % start) for start, count in places]
    rows.add("pictures", 22, pictures=pictures)
    assert rows.told(4) == ["join pictures", *["look for pictures"] * 2, "read 10 of pictures"]


def test_the_best_priority_goes_first_and_the_oldest_among_equals() -> None:
    rows = Rows(1, chunk=100)
    for name, level in (("bulk", BULK), ("first", DEFAULT), ("second", DEFAULT), ("high", HIGH)):
        rows.add(name, 1, level)
    order = []
    while row := rows.drive().row:
        order.append(row.row_id)
        rows.scheduler.remove(row)
    assert order == ["high", "first", "second", "bulk"]


def test_a_half_read_prompt_keeps_its_place_when_a_better_one_arrives() -> None:
    rows = Rows(1)
    rows.add("slow", 16, DEFAULT)
    rows.told(2)
    rows.add("high", 8, HIGH)
    assert rows.told(2) == ["read 8 of slow", "decode"]


def test_a_row_that_is_not_in_the_batch_can_be_removed() -> None:
    rows = Rows(1)
    rows.scheduler.remove(Row(RowRequest("nobody", [0], 1, Sampling())))
    rows.add("waiting", 3)
    rows.remove("waiting")
    assert rows.told() == ["idle"]


def test_a_row_of_the_best_level_takes_the_place_of_the_youngest_bulk_row() -> None:
    rows = Rows.filled(BULK, BULK, DEFAULT)
    rows.add("high", 4, HIGH)
    assert rows.told(4) == ["suspend row-1", "join high", "read 4 of high", "decode"]
    assert {row.row_id for row in rows.scheduler.decoding} == {"row-0", "row-2", "high"}
    rows.remove("high")
    assert rows.told(2) == ["resume row-1", "decode"]


def test_a_row_that_has_decoded_for_long_makes_place_as_one_that_has_not() -> None:
    rows = Rows.filled(BULK, BULK)
    rows.clock.now = 31
    rows.add("high", 1, HIGH)
    assert rows.told(3) == ["suspend row-1", "join high", "read 1 of high"]
    rows.clock.now = 31 + 30
    rows.remove("high")
    assert rows.told(2) == ["decode", "resume row-1"]


def test_a_row_that_rejoins_reads_its_tokens_again() -> None:
    rows = Rows.filled(BULK)
    rows.rows["row-0"].tokens += [7] * 10
    rows.scheduler.rejoin(rows.rows["row-0"])
    assert rows.told(3) == ["join row-0", "read 8 of row-0", "read 3 of row-0"]


def test_patience_with_a_row_that_rejoins_counts_from_then_on() -> None:
    rows = Rows.filled(BULK)
    rows.clock.now = 31
    rows.scheduler.rejoin(rows.rows["row-0"])
    rows.add("high", 1, HIGH)
    assert rows.told() == ["join high"]


def test_only_bulk_rows_make_place_and_only_for_the_best_level() -> None:
    rows = Rows.filled(DEFAULT, HIGH)
    rows.add("high", 1, HIGH)
    assert rows.told() == ["decode"]
    rows = Rows.filled(BULK)
    rows.add("default", 1, DEFAULT)
    assert rows.told() == ["decode"]


def test_a_row_that_has_waited_long_goes_first_and_is_not_suspended_any_more() -> None:
    rows = Rows.filled(DEFAULT)
    rows.add("bulk", 1, BULK)
    rows.clock.now = 30
    rows.add("high", 1, HIGH)
    rows.drive()
    rows.remove("row-0")
    assert rows.told(5) == ["join bulk", "read 1 of bulk", "decode", "decode", "decode"]


def test_a_steady_stream_of_better_rows_holds_a_bulk_row_up_no_longer_than_its_patience() -> None:
    rows = Rows.filled(HIGH)
    rows.add("bulk", 1, BULK)
    running = "row-0"
    for arrival in range(100):
        rows.clock.now += 1
        rows.add(f"high-{arrival}", 1, HIGH)
        rows.remove(running)
        row = rows.drive().row
        rows.told(2)
        assert row
        running = row.row_id
        if running == "bulk":
            break
    assert rows.clock.now == 30


def test_the_choices_of_a_job_take_turns_with_other_jobs_of_their_level() -> None:
    rows = Rows(2)
    for choice in range(5):
        rows.add(f"many:{choice}", 1, HIGH)
    joined = rows.told(2)
    rows.add("one:0", 1, HIGH)
    rows.clock.now = 29
    for running in ("many:0", "many:1", "one:0", "many:2"):
        rows.remove(running)
        rows.clock.now += 10
        joined += [told for told in rows.told(4) if told.startswith("join")]
    order = ["many:0", "many:1", "many:2", "one:0", "many:3", "many:4"]
    assert joined == [f"join {name}" for name in order]


def test_patience_with_a_job_counts_from_its_latest_turn() -> None:
    rows = Rows.filled(HIGH)
    rows.add("many:0", 1, BULK)
    rows.add("many:1", 1, BULK)
    rows.clock.now = 30
    rows.add("high", 1, HIGH)
    rows.remove("row-0")
    assert rows.told() == ["join many:0"]
    rows.remove("many:0")
    assert rows.told() == ["join high"]


def test_rows_that_do_not_fit_together_wait_however_many_places_are_free() -> None:
    rows = Rows(8, memory=2)
    for name in "abc":
        rows.add(name, 1)
    assert rows.told(4) == ["join a", "join b", "read 1 of a, 1 of b", "decode"]
    rows.remove("a")
    assert rows.told(2) == ["join c", "read 1 of c"]


def test_the_pages_of_a_suspended_row_go_only_where_it_is_in_the_way() -> None:
    rows = Rows(2, memory=3)
    for name in ("a", "b"):
        rows.add(name, 1, BULK)
    rows.told(4)
    rows.add("first", 1, HIGH)
    assert rows.told(3) == ["suspend b", "join first", "read 1 of first"]
    rows.add("second", 1, HIGH)
    assert rows.told(5) == ["decode", "suspend a", "evict b", "join second", "read 1 of second"]
    rows.remove("first")
    rows.remove("second")
    assert rows.told(3) == ["resume a", "join b", "decode"]
