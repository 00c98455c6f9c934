"""The order of feeding: a permutation, like beginnings together, even stretches."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.bulk import plan
from omlx_producer.bulk.plan import arrange, balanced, deal
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.wire import GenerationRequest


def row(number: int, prompt: str, tokens: int = 16) -> Row:
    request = GenerationRequest(model="m", prompt=prompt, max_completion_tokens=tokens)
    return Row(str(number), number, request, f"{number:024x}")


prompts = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=60)


@given(prompts)
def test_every_row_comes_out_once(texts: list[str]) -> None:
    rows = [row(n, text) for n, text in enumerate(texts)]
    assert sorted(r.line for r in balanced(rows)) == list(range(len(rows)))


@given(prompts)
def test_rows_with_a_common_beginning_come_one_after_the_other(texts: list[str]) -> None:
    arranged = [r.request.prompt for r in arrange([row(n, text) for n, text in enumerate(texts)])]
    changes = sum(a != b for a, b in itertools.pairwise(arranged))
    assert changes == max(0, len(set(texts)) - 1)


def test_a_beginning_is_common_only_as_far_as_it_counts() -> None:
    shared = "x" * plan.PREFIX_CHARACTERS
    rows = [row(0, shared + "a"), row(1, "alone"), row(2, shared + "b")]
    assert {r.line for r in arrange(rows)[:2]} == {0, 2}


def test_within_a_group_longer_common_beginnings_come_together() -> None:
    """Questions about documents, after the same instructions."""
    instructions = "i" * plan.PREFIX_CHARACTERS
    documents = [name * 8 * plan.PREFIX_CHARACTERS for name in "abc"]
    prompts = [instructions + documents[n % 3] + f"question {n}" for n in range(30)]
    alone = [f"{n}, alone" for n in range(9)]
    rows = [row(n, text, 1 + n) for n, text in enumerate([*prompts, *alone])]
    fed = [r.line for r in arrange(rows)]
    assert fed[30:] != sorted(fed[30:]), "those alone are dealt"
    assert sorted(fed[30:]) == list(range(30, 39))
    for start in (0, 10, 20):
        assert len({line % 3 for line in fed[start : start + 10]}) == 1


def test_the_same_prompt_many_times_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "deal", list)
    text = "x" * 100 * plan.PREFIX_CHARACTERS
    rows = [row(n, text) for n in range(5)]
    assert [r.line for r in arrange(rows)] == [0, 1, 2, 3, 4]


def test_any_stretch_of_a_group_holds_about_the_same_work() -> None:
    lengths = list(range(1, 401))
    random.Random(3).shuffle(lengths)
    work = [r.work for r in deal([row(n, "p", length) for n, length in enumerate(lengths)])]
    stretches = [sum(work[start : start + 20]) for start in range(0, 400, 20)]
    assert max(stretches) - min(stretches) <= 0.02 * sum(work) / 20


def test_rows_move_within_one_buffer_only() -> None:
    count = 2 * plan.BUFFER_ROWS + 5
    fed = list(balanced(row(n, "p", 1 + n % 50) for n in range(count)))
    for start in range(0, count, plan.BUFFER_ROWS):
        block = fed[start : start + plan.BUFFER_ROWS]
        assert sorted(r.line for r in block) == list(range(start, start + len(block)))


def test_no_more_is_read_than_fits_the_buffer() -> None:
    read = []

    def rows():
        for n in range(10 * plan.BUFFER_ROWS):
            read.append(n)
            yield row(n, "p")

    next(balanced(rows()))
    assert len(read) == plan.BUFFER_ROWS


def test_bad_rows_do_not_wait_for_a_buffer() -> None:
    bad = BadRow(2, None, "unparsable", "line 2: not JSON", "0" * 24, False)
    assert next(balanced(iter([row(1, "p"), bad]))) is bad


def test_rows_of_different_salts_are_not_mixed() -> None:
    beginning = "x" * 300
    rows = [row(n, beginning + str(n)) for n in range(8)]
    salts = [None, "a", "b", None, "a", "b", None, "c"]
    salted = [
        replace(each, request=each.request.model_copy(update={"cache_salt": salt}))
        for each, salt in zip(rows, salts, strict=True)
    ]
    order = [each.request.cache_salt for each in arrange(salted)]
    assert [salt for salt, _ in itertools.groupby(order)] == [None, "a", "b", "c"]
