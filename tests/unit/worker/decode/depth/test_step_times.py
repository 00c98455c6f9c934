"""What is known of the time of a step, and what is guessed."""

from __future__ import annotations

from omlx_worker.decode.depth.step_times import StepTimes, cell_of

CELL = cell_of(4, 100)


def timed(*steps: tuple[int, float], times: StepTimes | None = None) -> StepTimes:
    """The times after ten steps at each of these depths and of these seconds."""
    times = times or StepTimes()
    for depth, seconds in steps:
        for _ in range(10):
            times.add(CELL, depth, seconds)
    return times


def test_a_time_is_the_median_of_the_last_steps() -> None:
    times = timed((0, 1.0))
    for seconds in (9.0, 1.5, 1.5, 1.5, 0.1, 1.5):
        times.add(CELL, 0, seconds)

    assert times.at(CELL, [0]) == {0: 1.5}


def test_an_unknown_depth_is_between_its_neighbours_or_as_fast_as_the_deepest() -> None:
    assert timed((0, 1.0), (2, 3.0)).at(CELL, range(4)) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.0}


def test_an_unknown_shallower_depth_is_guessed_in_proportion_to_its_tokens() -> None:
    assert timed((3, 4.0)).at(CELL, [0, 1]) == {0: 1.0, 1: 2.0}


def test_the_depth_that_was_timed_longest_ago_comes_first_after_those_that_never_were() -> None:
    assert [*timed((0, 1.0), (2, 3.0), (1, 2.0), (0, 1.0)).at(CELL, range(4))] == [3, 2, 1, 0]


def test_a_depth_has_its_own_time_whatever_others_take() -> None:
    assert timed((3, 3.0), (0, 1.0), (0, 2.0)).at(CELL, [0, 3]) == {0: 2.0, 3: 3.0}


def test_a_new_size_has_the_times_of_the_nearest_until_it_is_timed() -> None:
    times, larger = timed((3, 3.0), (0, 1.0)), cell_of(8, 100)
    for _ in range(5):
        times.add(larger, 0, 2.0)

    assert times.at(larger, [0, 3]) == {0: 2.0, 3: 3.0}
    assert times.at(CELL, [0, 3]) == {0: 1.0, 3: 3.0}


def test_sizes_and_contexts_that_differ_little_are_one() -> None:
    assert cell_of(5, 1) == cell_of(8, 1024)
    assert cell_of(8, 1024) != cell_of(9, 1024)
    assert cell_of(8, 1024) != cell_of(8, 1025)
