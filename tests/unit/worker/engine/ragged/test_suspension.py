"""A row that was suspended, or interrupted and read again, ends as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run, small_classes

HOT = Sampling(temperature=0.9, filters={"top_p": 0.95}, seed=5)
PENALISED = replace(HOT, repetition_penalty=1.3, frequency_penalty=0.2)
SAMPLINGS = [GREEDY, HOT, PENALISED, replace(GREEDY, presence_penalty=0.6)]
TIERS = [
    PENALISED,
    *(pytest.param(each, marks=pytest.mark.slow) for each in SAMPLINGS if each is not PENALISED),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@dataclass
class Player:
    """Plays rows on a decoder and gathers what they yield."""

    decoder: RaggedDecoder
    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, request: RowRequest, generated: Sequence[int] = ()) -> None:
        self.tokens.setdefault(request.row_id, list(generated))
        self.rows[request.row_id] = enter(self.decoder, request, generated, chunk=16)

    def suspend(self, name: str) -> int:
        self.decoder.suspend(self.rows[name])
        return self.rows[name].kept_bytes

    def resume(self, name: str) -> None:
        self.decoder.resume(self.rows[name])

    def remove(self, name: str) -> None:
        self.decoder.leave(self.rows[name])

    def step(self, depth: int | None = None, times: int = 1) -> None:
        for _ in range(times):
            for step in self.decoder.step(depth):
                self.tokens[step.row_id] += [sampled.token for sampled in step.tokens]

    def until(self, name: str, length: int) -> list[int]:
        while len(self.tokens[name]) < length:
            self.step()
        return self.tokens[name][:length]


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sampling", TIERS)
def test_an_interrupted_row_goes_on_from_what_it_had_generated(
    qwen: Loaded, sampling: Sampling, depth: int
) -> None:
    whole = row("x", prompt(9), 40, sampling)
    wanted = run(qwen.decoder(depth), [whole])["x"]

    for length in (1, 17, 39):
        player = Player(qwen.decoder(depth))
        player.add(whole, wanted[:length])
        assert player.until("x", 40) == wanted

    assert len(set(wanted)) > 8, "the row is trivial"


def test_an_interrupted_row_stops_at_its_limit_counted_from_the_prompt(qwen: Loaded) -> None:
    player = Player(qwen.decoder())
    player.add(row("x", prompt(5), 12), [1, 2, 3, 4])

    player.step(times=20)

    assert len(player.tokens["x"]) == 12


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sampling", TIERS)
def test_a_suspended_row_goes_on_where_it_stood(
    qwen: Loaded, sampling: Sampling, depth: int
) -> None:
    rows = [row("x", prompt(9), 90, sampling), row("y", prompt(20, 1), 90, GREEDY)]
    wanted = run(qwen.decoder(depth), rows)
    player = Player(qwen.decoder(depth))
    for each in rows:
        player.add(each)

    player.step(times=7)
    assert player.suspend("x")
    player.step(times=5)
    at_rest = len(player.tokens["x"])
    player.step(times=5)
    assert len(player.tokens["x"]) == at_rest
    player.resume("x")

    assert {name: player.until(name, 90) for name in ("x", "y")} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED])
def test_rows_that_take_turns_in_a_slot_lose_no_accepted_draft(
    demo: Loaded, heldout_prompts: list[str], sampling: Sampling
) -> None:
    rows = [
        row(name, demo.tokenizer.encode(text), 24, sampling)
        for name, text in zip("xy", heldout_prompts, strict=False)
    ]
    wanted = run(demo.decoder(3), rows)
    player = Player(demo.decoder(3))
    for each in rows:
        player.add(each)
        player.step(times=2)
        player.suspend(each.row_id)
        player.step()

    while any(len(player.tokens[name]) < 24 for name in wanted):
        for name in wanted:
            player.resume(name)
            player.step(times=2)
            player.suspend(name)

    assert {name: tokens[:24] for name, tokens in player.tokens.items()} == wanted


def test_the_only_row_can_be_suspended_and_what_was_under_way_is_still_read(qwen: Loaded) -> None:
    wanted = run(qwen.decoder(2), [row("x", prompt(9), 60)])["x"]
    player = Player(qwen.decoder(2))
    player.add(row("x", prompt(9), 60))
    player.step(times=4)
    read = len(player.tokens["x"])

    player.suspend("x")
    assert player.decoder.slots == 0
    player.step()

    assert len(player.tokens["x"]) > read
    player.step(times=3)
    player.resume("x")
    assert player.until("x", 60) == wanted


def test_removing_one_suspended_row_leaves_the_others_tokens_to_be_read(qwen: Loaded) -> None:
    player = Player(qwen.decoder())
    for name in ("x", "y"):
        player.add(row(name, prompt(9), 60))
    player.step(times=4)
    for name in ("x", "y"):
        player.suspend(name)

    player.remove("x")
    before = len(player.tokens["x"]), len(player.tokens["y"])
    player.step()

    assert (len(player.tokens["x"]), len(player.tokens["y"])) == (before[0], before[1] + 1)
    with pytest.raises(KeyError):
        player.resume("x")


def test_a_row_that_is_still_being_read_cannot_be_suspended(qwen: Loaded) -> None:
    decoder = qwen.decoder()
    read = Row(row("x", prompt(40), 60))
    decoder.add(read)
    decoder.read({read: 8})

    with pytest.raises(ValueError, match="has no slot"):
        decoder.suspend(read)


def test_a_suspended_row_holds_its_history_and_not_the_batchs_capacity(qwen: Loaded) -> None:
    player = Player(qwen.decoder())
    player.add(row("long", prompt(700), 60))
    player.add(row("short", prompt(20, 1), 60))
    player.step(times=3)
    mx.synchronize()

    sizes = {}
    for name in ("long", "short"):
        sizes[name] = player.suspend(name)
    del player.decoder._in_flight
    mx.clear_cache()

    # Two heads of 32 dimensions, keys and values, float32; pages of 64 positions.
    attention = {"long": 11 * 64 * 512, "short": 1 * 64 * 512}
    assert sizes["long"] - sizes["short"] == attention["long"] - attention["short"]
    assert sizes["short"] < 2 * attention["short"]


@pytest.mark.slow
def test_suspended_rows_make_room_at_once(qwen: Loaded) -> None:
    rows = [row(str(index), prompt(9 + index, index), 40) for index in range(8)]
    wanted = run(qwen.decoder(2), rows)
    player = Player(qwen.decoder(2))
    for each in rows:
        player.add(each)
    player.step(times=3)
    batch = player.decoder
    others = [(0, 49)] * 4
    crowded = batch.bytes_for(others)

    for each in rows[:4]:
        player.suspend(each.row_id)

    assert batch.slots == 4
    # The suspended ones keep their pages.
    assert batch.bytes_for(others) < crowded
    for each in rows[:4]:
        player.resume(each.row_id)
    assert {name: player.until(name, 40) for name in wanted} == wanted


suspend = st.tuples(st.just("suspend_at"), st.integers(0, 3))
resume = st.tuples(st.just("resume_at"), st.integers(0, 3))
join = st.tuples(st.just("join"), st.integers(0, 5))
leave = st.tuples(st.just("leave"), st.integers(0, 5))
step = st.tuples(st.just("steps"), st.integers(1, 9), st.sampled_from([0, 1, 3]))
moves = st.lists(
    st.one_of(step, step, suspend, resume, resume, join, leave), min_size=50, max_size=60
)


class Company(Player):
    """Rows to hold against their undisturbed runs, and visitors who come and go."""

    def __init__(self, loaded: Loaded, rows: list[RowRequest]) -> None:
        super().__init__(loaded.decoder(3))
        self.undisturbed = [each.row_id for each in rows]
        self.visitors: list[str] = []
        self.suspended: set[str] = set()
        self.suspensions = 0
        for each in rows:
            self.add(each)

    def join(self, kind: int) -> None:
        name = f"visitor {len(self.tokens)}"
        sampling = [*SAMPLINGS, Sampling(1.0, seed=1), replace(HOT, filters={"top_k": 9})][kind]
        self.add(row(name, prompt(1 + 60 * kind, kind), 10_000, sampling))
        self.visitors.append(name)

    def leave(self, place: int) -> None:
        if place < len(self.visitors):
            self.remove(self.visitors.pop(place))

    def suspend_at(self, place: int) -> None:
        name = self.undisturbed[place]
        if name not in self.suspended:
            self.suspend(name)
            self.suspended.add(name)
            self.suspensions += 1

    def resume_at(self, place: int) -> None:
        name = self.undisturbed[place]
        if name in self.suspended:
            self.suspended.discard(name)
            self.resume(name)

    def steps(self, times: int = 1, depth: int | None = None) -> None:
        self.step(depth, times)


@pytest.mark.slow
@settings(
    max_examples=2,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(script=moves)
def test_rows_end_alike_however_they_are_suspended_and_whoever_comes_and_goes(
    qwen: Loaded, script: list[tuple[Any, ...]]
) -> None:
    length = TAIL + 40
    rows = [row(str(i), prompt(3 + 50 * i, i), length, s) for i, s in enumerate(SAMPLINGS)]
    wanted = undisturbed(qwen, rows)
    with small_classes():
        company = Company(qwen, rows)
        for move, *values in script:
            getattr(company, move)(*values)
        for lap in range(6):
            company.join(lap)
            company.suspend_at(lap % 4)
            company.steps(3, lap % 3)
            company.resume_at(lap % 4)
        for place in range(len(rows)):
            company.resume_at(place)
        got = {name: company.until(name, length) for name in wanted}

    assert got == wanted
    assert company.suspensions > 3


_UNDISTURBED: dict[int, dict[str, list[int]]] = {}


def undisturbed(loaded: Loaded, rows: list[RowRequest]) -> dict[str, list[int]]:
    key = id(loaded)
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = run(loaded.decoder(), rows)
    return _UNDISTURBED[key]
