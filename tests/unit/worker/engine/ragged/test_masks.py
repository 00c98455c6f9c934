"""Constrained rows match their schemas, in any company, and their neighbours do not notice."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event
from typing import Any

import mlx.core as mx
import pytest

from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.ragged import masks
from omlx_worker.engine.ragged.masks import Matcher, Run
from omlx_worker.engine.rows.constraints import Grammar, TooSlow
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row, RowStep
from tests.helpers.constrained import (
    ORDER,
    Ended,
    constrained,
    free,
    grammar_of,
    grammars,
    play,
)
from tests.helpers.decoding import GREEDY, Loaded, enter
from tests.helpers.schemas import faults, schema

SCHEMAS = 201
HOT = Sampling(temperature=0.9, filters={"top_p": 0.95}, seed=5)
PENALISED = replace(HOT, repetition_penalty=1.2, frequency_penalty=0.1)
DEPTHS = {"alone": (1, 3), "together": (0, 2)}


def alone(demo: Loaded, row: RowRequest | Row, depth: int) -> Ended:
    return play(demo.decoder(depth), [row])[row.row_id]


@pytest.mark.parametrize(
    ("sampling", "depths"),
    [
        (HOT, {"alone": (), "together": (2,)}),
        *(
            pytest.param(sampling, DEPTHS, marks=pytest.mark.slow)
            for sampling in (HOT, GREEDY, PENALISED)
        ),
    ],
)
def test_a_constrained_row_says_the_same_at_every_depth_and_in_company(
    demo: Loaded, sampling: Sampling, depths: dict[str, tuple[int, ...]]
) -> None:
    row = constrained("x", sampling=sampling)
    others = [free("f", HOT), constrained("y", sampling=replace(sampling, seed=9)), free("g")]
    wanted = alone(demo, row, 0)

    assert wanted.reason == "stop"
    assert faults(ORDER, wanted.text) == []
    for depth in depths["alone"]:
        assert alone(demo, row, depth).text == wanted.text
    for depth in depths["together"]:
        assert play(demo.decoder(depth), [others[0], row, *others[1:]])["x"].text == wanted.text


@pytest.mark.parametrize(
    ("depth", "tokens"),
    [(3, 8), *(pytest.param(depth, 40, marks=pytest.mark.slow) for depth in (0, 3))],
)
def test_neighbours_say_the_same_with_and_without_a_constrained_row(
    demo: Loaded, depth: int, tokens: int
) -> None:
    samplings = {"greedy": GREEDY, "hot": HOT, "penalised": PENALISED}
    neighbours = [free(name, sampling, tokens=tokens) for name, sampling in samplings.items()]
    wanted = play(demo.decoder(depth), neighbours)

    company = [*neighbours, constrained("x", sampling=HOT, tokens=tokens)]
    together = play(demo.decoder(depth), company)

    assert {name: together[name].tokens for name in wanted} == {
        name: ended.tokens for name, ended in wanted.items()
    }


def test_rows_without_a_constraint_may_sample_any_token(demo: Loaded) -> None:
    grammar = grammars().compile(Constraint("choice", '["yes", "no"]'))
    state = {"offered": mx.zeros((2,), mx.int32)}
    words = -(-grammar.vocabulary // masks.BITS)

    allowed, _ = masks.fill({1: Matcher(grammar)}, {}, grammar.vocabulary, state, 0)

    assert allowed[0].tolist() == [[2**masks.BITS - 1] * words]
    assert allowed[1].tolist() != allowed[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_a_suspended_row_and_one_resumed_from_its_tokens_end_with_the_same_text(
    demo: Loaded, depth: int
) -> None:
    row = constrained("x", sampling=HOT)
    wanted = alone(demo, row, depth)

    paused = play(demo.decoder(depth), [row, free("f")], pause={"x": (4, 7)})
    assert paused["x"].text == wanted.text
    for length in (1, 9, len(wanted.tokens) - 2):
        resumed = Row(row, generated=wanted.tokens[:length])
        assert alone(demo, resumed, depth).text == wanted.text


@pytest.mark.slow
def test_lookups_beside_constraints_change_no_text(demo: Loaded) -> None:
    rows = [constrained("x"), constrained("y", sampling=HOT), free("f")]
    wanted = play(demo.decoder(3), rows)

    looked_up = play(demo.decoder(3, 4), rows)

    assert {n: e.text for n, e in looked_up.items()} == {n: e.text for n, e in wanted.items()}


def test_a_batch_without_constraints_takes_one_dispatch_and_with_them_three(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    submit = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (calls.append(len(a)), submit(*a)))
    decoder = demo.decoder(2)

    play(decoder, [free("f", tokens=12)])
    plain, reads = len(calls), decoder.reads
    play(decoder, [constrained("x", tokens=12)])

    # A step may be dispatched after the last that is read.
    assert plain - reads in (0, 1)
    # The state's arrays, which the host reads, go out before the forward.
    assert len(calls) - plain in (3 * (decoder.reads - reads), 3 * (decoder.reads - reads + 1))


def test_log_probabilities_are_those_of_what_is_allowed(demo: Loaded) -> None:
    grammar = grammars().compile(Constraint("choice", '["yes", "no"]'))
    row = constrained("x", grammar, Sampling(temperature=0.0, top_logprobs=5))
    decoder = demo.decoder()
    enter(decoder, row)
    decoder.step()
    [first] = decoder.step()

    allowed = {demo.tokenizer.decode([token]): value for token, value in first.tokens[0].top}
    assert set(allowed) <= {"y", "yes", "n", "no", "ye"}
    assert sum(2.718281828**value for value in allowed.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_rows_of_the_ratio_rule_obey_the_schema_too(demo: Loaded) -> None:
    rows = [
        constrained(str(seed), sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(6)
    ]

    for ended in play(demo.decoder(3), [*rows, free("f", HOT)]).values():
        if ended.reason == "stop":
            assert faults(ORDER, ended.text) == []


def test_forced_text_takes_fewer_steps(demo: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = alone(demo, constrained("x"), 3)
    monkeypatch.setattr(Matcher, "runs", lambda *_: [])
    drafted = alone(demo, constrained("x"), 3)

    assert forced.text == drafted.text
    assert forced.steps < 0.9 * drafted.steps


def test_a_row_that_may_not_draft_is_forced_nothing(demo: Loaded) -> None:
    ended = alone(demo, replace(constrained("x"), depth=0), 3)

    assert ended.steps == len(ended.tokens)


def test_a_row_whose_grammar_gives_up_is_cut_and_its_neighbours_go_on(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Matcher.commit

    def fails(self: Matcher, tokens: list[int]) -> None:
        commit(self, tokens)
        self.failed |= len(tokens) > 0

    monkeypatch.setattr(Matcher, "commit", fails)
    ended = play(demo.decoder(2), [constrained("x"), free("f")])

    assert ended["x"].reason == "length"
    assert ended["x"].text.startswith("{")
    assert len(ended["f"].tokens) == 40


AMBIGUOUS = r"start: s" "\n" r"s: s s s | s s | /[a-z \n():.=_]/ |"


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_a_row_whose_grammar_takes_too_long_to_follow_ends_and_its_neighbours_go_on(
    demo: Loaded, depth: int
) -> None:
    """Each token of the grammar costs more than the one before; 160 would take minutes."""
    constraint = Constraint("grammar", AMBIGUOUS.replace("_]", f"{depth}_]"))
    grammar = grammars().compile(constraint)

    rows = [constrained("x", grammar), constrained("y", grammar), constrained("z"), free("f")]
    ended = play(demo.decoder(depth), rows)

    assert ended["x"].reason == ended["y"].reason == "length"
    assert len(ended["x"].tokens) < 100
    assert ended["z"].reason == "stop"
    assert len(ended["f"].tokens) == 40
    with pytest.raises(TooSlow):
        grammars().compile(constraint)
    assert alone(demo, constrained("again", grammar), depth).steps == 1


@pytest.mark.slow
def test_a_grammar_whose_one_mask_takes_seconds_does_not_hold_up_a_step(demo: Loaded) -> None:
    rules = "abcde"
    pairs = " | ".join(f"{one} {other}" for one in rules for other in rules)
    text = 'start: "x" a\n' + "\n".join(f'{rule}: {pairs} | " "' for rule in rules)
    grammar = grammars().compile(Constraint("grammar", text))
    decoder, seconds = demo.decoder(2), list[float]()
    play(decoder, [constrained("z")])
    step = decoder.step

    def timed() -> list[RowStep]:
        began = time.monotonic()
        steps = step()
        seconds.append(time.monotonic() - began)
        return steps

    decoder.step = timed  # type: ignore[method-assign, assignment]
    ended = play(decoder, [constrained("x", grammar), constrained("z"), free("f")])

    assert grammar.too_slow
    assert (ended["x"].reason, ended["z"].reason) == ("length", "stop")
    assert len(ended["f"].tokens) == 40
    assert max(seconds) < 2


@pytest.mark.slow
def test_a_row_whose_step_does_not_end_is_left_behind(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, follow = Event(), Matcher.follow

    def hangs(self: Matcher, *args: Any, **options: Any) -> list[Run]:
        if self._grammar is hanging:
            released.wait()
        return follow(self, *args, **options)

    monkeypatch.setattr(Matcher, "follow", hangs)
    hanging = grammars()._compiled(Constraint("regex", "[a-z]+"))
    assert isinstance(hanging, Grammar)
    try:
        ended = play(demo.decoder(2), [constrained("x", hanging), constrained("z"), free("f")])
    finally:
        released.set()

    assert (ended["x"].reason, ended["x"].tokens) == ("length", ())
    assert ended["z"].reason == "stop"
    assert len(ended["f"].tokens) == 40
    assert hanging.too_slow


def test_a_resumed_row_goes_on_where_its_grammar_was(demo: Loaded) -> None:
    row = constrained("x", grammar_of({"const": "aaaa"}))
    whole = alone(demo, row, 0)

    resumed = Row(row, generated=whole.tokens[:2])

    assert alone(demo, resumed, 0).tokens == whole.tokens


def test_a_row_resumed_from_tokens_outside_its_grammar_is_cut(demo: Loaded) -> None:
    row = Row(constrained("x"), generated=demo.tokenizer.encode("[1"))

    ended = alone(demo, row, 2)

    assert (ended.reason, ended.text) == ("length", "[1")


@pytest.mark.parametrize("depth", [0, 3])
def test_a_constraint_may_begin_after_a_marker(demo: Loaded, depth: int) -> None:
    frame = 'start: before @answer\nbefore[suffix="return"]: /(?s:.*)/\n'
    grammar = grammars().compile(Constraint("regex", "[0-9]{3}", frame))
    row = constrained("x", grammar, GREEDY)

    ended = alone(demo, row, depth)

    before, marker, after = ended.text.partition("return")
    assert (marker, ended.reason) == ("return", "stop")
    assert len(before) > 3
    assert after.isdigit()
    assert len(after) == 3


def checked(loaded: Loaded, outputs: range, depth: int, tokens: int = 160) -> int:
    """Decode an output of a schema each, in one batch with a free row; returns how many ended."""
    rows = [
        constrained(
            str(output),
            grammar_of(schema(output % SCHEMAS), loaded),
            Sampling(temperature=1.0, seed=output) if output % 2 else GREEDY,
            tokens=tokens,
            loaded=loaded,
        )
        for output in outputs
    ]
    played = play(loaded.decoder(depth), [*rows, free("f", HOT, loaded=loaded)], loaded=loaded)
    texts = {name: end.text for name, end in played.items() if end.reason == "stop"}
    wrong = {name: faults(schema(int(name) % SCHEMAS), text) for name, text in texts.items()}
    assert {name: found for name, found in wrong.items() if found} == {}
    return len(texts)


@pytest.mark.slow
def test_outputs_of_random_weights_match_their_schemas(qwen: Loaded) -> None:
    assert checked(qwen, range(12), 2) > 7


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_outputs_of_the_demo_model_match_their_schemas(
    demo: Loaded, pytestconfig: pytest.Config
) -> None:
    outputs: int = pytestconfig.getoption("--constrained-outputs")
    starts = range(0, outputs, 50)

    # 201 schemas are in step with neither depths nor samplings, so each meets all of them.
    ended = sum(checked(demo, range(start, start + 50), start // 50 % 4) for start in starts)

    assert ended > 0.7 * outputs


def test_a_mask_one_place_late_would_be_noticed(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*given: Any) -> tuple[mx.array, mx.array]:
        bits, forced = masks.fill(*given)
        return mx.concatenate([bits[:, :1], bits[:, :-1]], axis=1), forced

    monkeypatch.setattr("omlx_worker.engine.ragged.decoder.fill", late)
    row = constrained("x", sampling=HOT, tokens=60)

    ended = alone(demo, row, 3)

    assert ended.reason == "length" or faults(ORDER, ended.text)
