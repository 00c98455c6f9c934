"""A smaller model drafts: which text comes is the model's own, and all it reads is in its place."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from omlx_worker.engine.kernels.window import TAIL, Window
from omlx_worker.engine.loading.drafters import drafter_of
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.loader import decoder_of, load, load_engine
from omlx_worker.engine.models.draft_model import DraftModel
from omlx_worker.engine.models.ragged_model import RaggedModel, Unsupported
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.footprint import Footprint
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.checkpoints import LLAMA, write_family, write_llama
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run
from tests.helpers.rotation import turned

pytestmark = pytest.mark.usefixtures("small_buckets")

HOT = Sampling(temperature=0.8, filters={"top_p": 0.9}, repetition_penalty=1.1, seed=77)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow),
    pytest.param(HOT, id="coupled"),
]


@pytest.fixture(scope="module")
def target(llama_path: Path) -> nn.Module:
    """Its weights are spread out, so that its text depends on every position."""
    return load(llama_path)[0]


def smaller(**config: Any) -> nn.Module:
    mx.random.seed(5)
    args = LLAMA | {"num_hidden_layers": 1, "hidden_size": 32} | config
    return llama.Model(llama.ModelArgs.from_dict(args))


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def drafted(target: RaggedModel, draft: RaggedModel) -> RaggedModel:
    target.drafter = DraftModel(draft, target.vocabulary)
    return target


def with_drafts(target: nn.Module, draft: nn.Module, depth: int) -> RaggedDecoder:
    return RaggedDecoder(drafted(as_ragged(target, drafts=False), as_ragged(draft)), depth)


class Counter:
    """Counts a decoder's drafts, and gives its steps the depths of a cycle."""

    def __init__(self, decoder: RaggedDecoder, depths: list[int] | None = None) -> None:
        self.drafted = self.accepted = self._steps = 0
        inner = decoder.step

        def step() -> list[Any]:
            self._steps += 1
            depth = None if depths is None else depths[self._steps % len(depths)]
            steps = inner(depth)
            self.drafted += sum(step.drafted for step in steps)
            self.accepted += sum(step.accepted for step in steps)
            return steps

        decoder.step = step  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("family", "depths"),
    [
        ("llama", [2, 0, 0, 3, 1]),
        pytest.param("llama", [3], marks=pytest.mark.slow),
        pytest.param("gemma3_text", [2, 0, 3], marks=pytest.mark.slow),
        pytest.param("gpt_oss", [1], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_model_that_drafts_for_itself_has_every_draft_accepted(
    tmp_path: Path, family: str, depths: list[int], sampling: Sampling
) -> None:
    model = load(write_family(tmp_path, family))[0]
    decoder = with_drafts(model, model, 3)
    counter = Counter(decoder, depths)
    tokens = TAIL + 30

    run(
        decoder,
        [row(str(n), prompt(n), tokens, sampling) for n in (1, 2, 70)],
        arrivals={"2": 7},
    )

    assert counter.accepted == counter.drafted > tokens / 2


def test_a_shift_of_all_turns_changes_neither_noise_nor_caches(
    target: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(with_drafts(target, target, 2), [row("x", prompt(20), 40, HOT)])
    at = Window.at
    monkeypatch.setattr(Window, "at", lambda *where: turned(at(*where), 7))
    decoder = with_drafts(target, target, 2)
    counter = Counter(decoder)

    assert run(decoder, [row("x", prompt(20), 40, HOT)]) == wanted
    assert counter.accepted == counter.drafted > 0


def test_a_draft_model_that_reads_one_position_off_would_be_noticed(target: nn.Module) -> None:
    decoder = with_drafts(target, target, 2)
    counter, start = Counter(decoder), Window.starting_at

    def late(window: Window, cursors: mx.array, width: int) -> Window:
        return start(window, cursors + 1, width)

    with patch.object(Window, "starting_at", late):
        run(decoder, [row("x", prompt(20), 60)])

    assert counter.accepted < counter.drafted


@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_in_company_have_the_text_of_the_model_alone(
    target: nn.Module, sampling: Sampling, depth: int
) -> None:
    rows = [row(str(n), prompt(n), 50, replace(sampling, seed=n)) for n in (1, 9, 40, 17)]
    wanted = {
        each.row_id: run(RaggedDecoder(as_ragged(target)), [each])[each.row_id] for each in rows
    }

    got = run(
        with_drafts(target, smaller(), depth),
        rows,
        arrivals={"9": 5, "17": 12},
        departures={"40": 23},
    )

    assert got == {**wanted, "40": wanted["40"][:23]}


def test_a_suspended_row_takes_what_the_draft_model_has_read_with_it(target: nn.Module) -> None:
    decoder = with_drafts(target, target, 2)
    counter = Counter(decoder)
    wanted = run(RaggedDecoder(as_ragged(target)), [row("x", prompt(30), 60)])["x"]
    suspended = enter(decoder, row("x", prompt(30), 90))
    enter(decoder, row("y", prompt(12), 90))
    got: list[int] = []

    def decode(steps: int) -> None:
        for _ in range(steps):
            for step in decoder.step():
                got.extend(s.token for s in step.tokens if step.row_id == "x")

    decode(8)
    decoder.suspend(suspended)
    decode(8)
    decoder.resume(suspended)
    decode(14)

    assert got[:60] == wanted
    assert counter.accepted == counter.drafted > 60


def test_a_recurrent_model_may_have_a_draft_model_instead_of_its_head(qwen: Loaded) -> None:
    given = {str(n): prompt(n) for n in (1, 25)}

    decoder = with_drafts(qwen.network, smaller(), 2)
    got = run(decoder, [row(name, tokens, 40) for name, tokens in given.items()])

    assert got == {name: qwen.greedy(tokens, 40) for name, tokens in given.items()}


def test_a_recurrent_model_drafts_for_no_other(qwen: Loaded, target: nn.Module) -> None:
    with pytest.raises(Unsupported, match="keep keys and values alone"):
        with_drafts(target, qwen.network, 1)
    with pytest.raises(ModelError, match=r"--drafter qwen: .* keep keys and values alone; give"):
        decoder_of(target, 1, 2, partial(drafter_of, "qwen", qwen.network))


@pytest.mark.parametrize("vocabulary", [250, 300])
def test_the_vocabularies_may_be_padded_to_different_sizes(
    target: nn.Module, vocabulary: int
) -> None:
    rows = [row("x", [256, 255, *prompt(9)], 40), row("y", [3], 40, replace(HOT, seed=5))]
    wanted = run(RaggedDecoder(as_ragged(target)), rows[:1])

    got = run(with_drafts(target, smaller(vocab_size=vocabulary), 2), rows)

    assert got["x"] == wanted["x"]
    assert all(0 <= token < 257 for token in got["y"])


def test_the_footprint_has_the_weights_and_caches_of_both(target: nn.Module) -> None:
    own, other = as_ragged(target), as_ragged(smaller())
    both = drafted(as_ragged(target), other)

    assert both.weight_bytes == own.weight_bytes + other.weight_bytes
    tokens = [Footprint(model, 2).of_row.token for model in (own, other, both)]
    assert tokens[2] == tokens[0] + tokens[1]


def test_an_engine_loads_a_model_that_drafts_only_if_it_drafts(tmp_path: Path) -> None:
    model, draft = (str(write_llama(tmp_path / name, seed)) for seed, name in enumerate("md"))
    engine = load_engine(model, max_rows=1, depth=2, drafter=draft)
    plain = load_engine(model, max_rows=1, depth=0, drafter=draft)

    assert engine.info.draft_depth == 2
    assert plain.info.draft_depth == 0
    assert engine.weight_bytes == 2 * plain.weight_bytes


def test_a_draft_model_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    model, other = str(write_llama(tmp_path / "model")), write_llama(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(
        tokenizer.read_text()
        .replace('"a":', '"zzz":')
        .replace('"b":', '"a":')
        .replace('"c":', '"b":')
        .replace('"d":', '"c":')
    )

    def refused(draft: str) -> str:
        with pytest.raises(ModelError) as caught:
            load_engine(model, max_rows=1, depth=2, drafter=draft)
        return str(caught.value)

    assert "253 of its 257 tokens are among the model's 257 by the same ids" in refused(str(other))
    assert refused("/no/such") == (
        "--drafter /no/such: no such directory; give a directory or a repository, or give one of "
        "head, lookup, none"
    )
    (other / "config.json").unlink()
    assert refused(str(other)).startswith(f"--drafter {other}: no checkpoint")
