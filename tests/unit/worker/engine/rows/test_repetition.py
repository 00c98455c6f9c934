"""Texts that repeat themselves are found at the token where vLLM's rule finds them."""

from __future__ import annotations

import random

import pytest

from omlx_producer.wire import LOOPS, RepetitionDetection
from omlx_worker.engine.rows.repetition import Repetition
from tests.helpers.decoding import Loaded


def detection(**fields: int) -> RepetitionDetection:
    return RepetitionDetection.model_validate(fields)


def found_at(tokens: list[int], wanted: RepetitionDetection) -> int | None:
    """How many tokens were there when a repetition was found."""
    watch = Repetition(wanted)
    return next((n for n, token in enumerate(tokens, 1) if watch.feed(token)), None)


def by_the_rule(tokens: list[int], wanted: RepetitionDetection) -> int | None:
    """The same by vLLM's rule, word for word: each tail is compared with what is before it."""
    for end in range(1, len(tokens) + 1):
        for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
            count = max(wanted.min_count, -(-wanted.min_tokens // size))
            tail = tokens[max(0, end - size * count) : end]
            if tail == tail[:size] * count:
                return end
    return None


@pytest.mark.parametrize(
    "wanted",
    [
        detection(max_pattern_size=1, min_count=2),
        detection(max_pattern_size=4, min_count=3),
        detection(max_pattern_size=6, min_pattern_size=3, min_count=2),
        detection(max_pattern_size=20, min_count=4),
    ],
)
def test_random_texts_end_where_the_rule_says(wanted: RepetitionDetection) -> None:
    draw = random.Random(7)
    for _ in range(300):
        tokens: list[int] = []
        while len(tokens) < 60:
            pattern = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
            tokens += pattern * draw.randrange(1, 6)
        assert found_at(tokens, wanted) == by_the_rule(tokens, wanted)


def test_a_pattern_must_cover_the_least_tokens() -> None:
    tokens = [1, 2] * 50
    assert found_at(tokens, detection(max_pattern_size=4, min_count=3)) == 6
    assert found_at(tokens, detection(max_pattern_size=4, min_count=3, min_tokens=40)) == 40


def test_a_loop_that_begins_late_is_found_as_soon_as_an_early_one() -> None:
    before = list(range(100, 1100))
    assert found_at(before + [1, 2, 3] * 9, detection(max_pattern_size=8, min_count=4)) == 1012


def test_rows_of_files_may_tabulate_what_is_alike() -> None:
    """A table of 30 columns, 100 rows of one label, a long rule: none is a loop."""
    header, label, rule = [7, 8] * 30, [5, 6] * 100, [9] * 200
    assert found_at(header + label + rule, LOOPS) is None
    assert found_at([1, 2, 3, 4] * 270, LOOPS) == 1024


@pytest.mark.parametrize(
    ("one", "between", "count"),
    [
        (" ".join("0" * 16), "\n", 16),
        (f"[{', '.join('0' * 16)}]", ",\n", 16),
        ("0", ", ", 256),
        ('{"name": "unknown", "value": 0, "unit": null}', ",\n", 30),
    ],
    ids=["a table of zeros", "a list of lists", "a list of zeros", "equal objects"],
)
def test_code_and_data_may_say_one_thing_often(
    demo: Loaded, one: str, between: str, count: int
) -> None:
    def tokens(count: int) -> list[int]:
        return demo.tokenizer.encode(between.join([one] * count))

    assert found_at(tokens(count), LOOPS) is None
    assert found_at(tokens(8 * count), LOOPS)
