"""A row that takes a beginning up is the row that read it, whatever is kept, split and dropped."""

from __future__ import annotations

import gc
import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from omlx_worker.engine.ragged.prefix_arrays import ArraySpec, LayerSpecs
from tests.helpers.decoding import Loaded
from tests.helpers.families import SLIDING, tiny
from tests.helpers.prefixes import (
    AMPLE,
    DROPS,
    KINDS,
    PROMPT,
    READS,
    Kept,
    Rows,
    check_tree,
    equal,
    findable,
    give_up,
    play,
)
from tests.helpers.readers import Network, StandIn, read_all, read_on

FAMILIES = [
    "llama",
    "gemma3_text",
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba", "qwen3_5")),
]

ROUNDING = 1e-3
"""By which a network's arrays, of values up to 5, differ when it reads in other chunks."""

ACTS = st.one_of(READS, DROPS)


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest) -> Network:
    if request.param == "qwen3_5":
        qwen: Loaded = request.getfixturevalue("qwen")
        return Network(qwen.network)
    return Network(tiny(request.param))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=25, deadline=None)
@given(script=st.lists(ACTS, max_size=14), limit=st.sampled_from([300, 1000, AMPLE]))
def test_rows_are_exact_whatever_is_kept_and_dropped(
    kinds: tuple[str, ...], script: list[Any], limit: int
) -> None:
    reader = StandIn(*kinds)
    play(reader, script, lambda: Kept(reader.specs, limit))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@settings(max_examples=200, deadline=None)
@given(script=st.lists(ACTS, max_size=40), limit=st.sampled_from([300, 1000, 3000, AMPLE]))
def test_many_rows_are_exact_whatever_is_kept_and_dropped(
    kinds: tuple[str, ...], script: list[Any], limit: int
) -> None:
    reader = StandIn(*kinds)
    play(reader, script, lambda: Kept(reader.specs, limit))


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(script=st.lists(ACTS, min_size=6, max_size=8))
def test_rows_of_a_network_are_exact_too(network: Network, script: list[Any]) -> None:
    play(network, script, lambda: Kept(network.specs, 100_000), ROUNDING)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(script=st.lists(ACTS, min_size=6, max_size=20))
def test_many_rows_of_a_network_are_exact_too(network: Network, script: list[Any]) -> None:
    play(network, script, lambda: Kept(network.specs, 200_000), ROUNDING)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(SLIDING - 1, marks=pytest.mark.slow),
        SLIDING,
        SLIDING + 1,
        pytest.param(70, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7])
def test_reading_on_from_a_beginning_changes_no_bit(
    network: Network, length: int, chunk: int
) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(256) for _ in range(length + 9)]
    cache = Kept(network.specs, AMPLE)
    cold = read_all(network, prompt[:length], 16)
    cache.keep(prompt[:length], cold)
    cold = read_on(network, prompt, length, cold, chunk)

    found, taken = cache.find(prompt)
    assert findable(cache, prompt) == found == length
    taken = read_on(network, prompt, length, taken, chunk)

    assert equal(network.arrays(taken), network.arrays(cold))
    one, other = (network.logits(3, len(prompt), layers) for layers in (taken, cold))
    assert equal([one], [other])


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_no_row_sees_what_becomes_of_nodes_and_of_who_put_them(kinds: tuple[str, ...]) -> None:
    reader = StandIn(*kinds)
    cache = Kept(reader.specs, AMPLE)
    cold = read_all(reader, PROMPT)
    cache.keep(PROMPT, cold)
    wanted = [mx.array(part.tolist()) for part in reader.arrays(cold)]

    for part in reader.arrays(cold):
        part[...] = mx.nan
    _, taken = cache.find(PROMPT)
    mx.eval(taken)
    give_up(cache, cache.nbytes)

    assert equal(reader.arrays(taken), wanted)


def test_layers_that_can_be_cut_are_taken_up_anywhere() -> None:
    reader = StandIn("all", "all")
    cache = Kept(reader.specs, AMPLE)
    cache.keep([1, 2, 3, 4], read_all(reader, [1, 2, 3, 4]))

    assert findable(cache, [1, 2, 3, 7]) == 3
    assert findable(cache, [1, 2]) == 2
    assert findable(cache, [2, 2]) == findable(cache, []) == 0


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_other_layers_are_taken_up_where_they_were_put(kind: str) -> None:
    reader = StandIn("all", kind)
    cache = Kept(reader.specs, AMPLE)
    prompt = [1, 2, 3, 4, 5]
    cache.keep(prompt, read_all(reader, prompt))

    assert findable(cache, [1, 2, 3, 7]) == 0
    assert cache.shared([1, 2, 3, 7]) == 3, "where the next one could be put"
    assert findable(cache, [*prompt, 6]) == 5
    cache.keep(prompt[:3], read_all(reader, prompt[:3]))
    assert findable(cache, [1, 2, 3, 7]) == 3
    assert findable(cache, [*prompt, 6]) == 5


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_a_prompt_goes_on_where_others_went_on_to_another_page(kind: str) -> None:
    reader = StandIn("all", kind)
    cache = Kept(reader.specs, AMPLE)
    for length in (Rows.PAGE + 2, 20):
        cache.keep(PROMPT[:length], read_all(reader, PROMPT[:length]))

    prompt = [*PROMPT[: 3 * Rows.PAGE], 99]
    assert findable(cache, prompt) == Rows.PAGE + 2
    assert cache.shared(prompt) == 3 * Rows.PAGE


def test_where_prompts_part_is_kept_though_what_followed_it_gives_way() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, AMPLE)
    cache.keep(PROMPT, read_all(reader, PROMPT))
    pages = len(PROMPT) // Rows.PAGE * Rows.PAGE * 12
    cache.limit_to(cache.nbytes)

    cache.keep(PROMPT[: Rows.PAGE], read_all(reader, PROMPT[: Rows.PAGE]))

    assert cache.nbytes < pages
    assert findable(cache, PROMPT) == Rows.PAGE
    check_tree(cache)


def test_what_beginnings_share_is_kept_once() -> None:
    reader = StandIn("all")
    cache = Kept(reader.specs, AMPLE)
    for last in range(5):
        prompt = [*range(100), last]
        cache.keep(prompt, read_all(reader, prompt))
        cache.keep(prompt, read_all(reader, prompt))

    pages = 100 // Rows.PAGE + 5
    assert cache.nbytes == pages * Rows.PAGE * (1 + 2) * 4


def test_nothing_is_kept_beyond_what_is_counted() -> None:
    def keep(tokens: list[int]) -> None:
        # Parts of larger arrays.
        ring = list(mx.random.normal((2, 1, 4, 2000, 64))[..., :300, :])
        cache.keep(tokens, [ring, [mx.random.normal((1, 4000, 64))[:, -500:]]])

    gc.collect()
    mx.synchronize()
    ring, states = ArraySpec((1, 4, 1, 64), mx.float32, 300), ArraySpec((1, 500, 64), mx.float32, 0)
    cache, before = Kept(LayerSpecs([[ring, ring], [states]]), AMPLE), mx.get_active_memory()
    keep([0] * 2000)
    keep([0] * 1000 + [1] * 500)
    mx.synchronize()

    arrays = 2 * 3
    taken = mx.get_active_memory() - before
    assert cache.nbytes == 2 * 4 * (2 * 4 * 300 * 64 + 500 * 64)
    # Other tests may have left a few bytes that are freed meanwhile.
    assert cache.nbytes - 1024 <= taken <= cache.nbytes + arrays * 16_384
    give_up(cache, cache.nbytes)
    assert cache.nbytes == 0
    assert mx.get_active_memory() <= before + 1024


def test_the_least_recently_used_goes_first() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, 3 * (Rows.PAGE * 12 + 8))
    for first in (1, 2, 3):
        cache.keep([first, 0], read_all(reader, [first, 0]))
    assert cache.nbytes == cache.limit
    cache.find([1, 0])[0]

    cache.keep([4, 0], read_all(reader, [4, 0]))

    assert [findable(cache, [first, 0]) for first in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_a_beginning_outlives_what_follows_it() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, AMPLE)
    for length in (4, 8, 12):
        cache.keep(PROMPT[:length], read_all(reader, PROMPT[:length]))

    for length in (8, 4, 0):
        assert give_up(cache, 1) > 0
        assert findable(cache, PROMPT[:12]) == length


def test_a_branch_that_leads_nowhere_goes_with_what_followed_it() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, AMPLE)
    for prompt in ([1, 2, 3], [1, 2, 4]):
        cache.keep(prompt, read_all(reader, prompt))
    assert cache.shared([1, 2]) == 2

    give_up(cache, 1)
    assert cache.shared([1, 2]) == 2
    give_up(cache, 1)

    assert cache.shared([1, 2]) == 0
    assert cache.nbytes == 0


def test_what_does_not_fit_costs_nothing_else_its_place() -> None:
    reader = StandIn("all")
    cache = Kept(reader.specs, 120)
    cache.keep([1, 2], read_all(reader, [1, 2]))

    cache.keep([5] * 11, read_all(reader, [5] * 11))

    assert findable(cache, [1, 2]) == 2
    assert findable(cache, [5] * 11) == 0


def test_a_limit_of_zero_keeps_nothing() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, 0)
    cache.keep([1, 2], read_all(reader, [1, 2]))

    assert findable(cache, [1, 2]) == cache.find([1, 2])[0] == cache.nbytes == 0
    assert give_up(cache, 10) == 0


def test_too_few_pages_are_refused() -> None:
    cache = Kept(StandIn("all").specs, AMPLE)
    with pytest.raises(ValueError, match="1 pages do not hold 5 tokens"):
        cache.put([1] * 5, cache.rows.new(1), [])


def test_a_prompt_of_another_salt_finds_nothing() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, AMPLE)
    cache.keep(PROMPT, read_all(reader, PROMPT), "theirs")

    for salt, length in (("ours", 0), (None, 0), ("", 0), ("theirs", 20)):
        assert cache.shared(PROMPT, salt) == length
        assert cache.find(PROMPT, salt)[0] == length


def test_salts_take_the_room_of_others_and_leave_nothing_behind() -> None:
    reader = StandIn("all", "recurrent")
    cache = Kept(reader.specs, AMPLE)
    cache.keep(PROMPT, read_all(reader, PROMPT), "first")
    size = cache.nbytes
    cache.limit_to(2 * size)
    for salt in "abcdef":
        cache.keep(PROMPT, read_all(reader, PROMPT), salt)

    held = [salt for salt in ("first", *"abcdef") if cache.shared(PROMPT, salt)]
    assert held == ["e", "f"]
    assert cache.nbytes == 2 * size
    check_tree(cache)
    cache.limit_to(0)
    check_tree(cache)
    assert not cache._roots
