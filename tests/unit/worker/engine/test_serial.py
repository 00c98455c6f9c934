"""Families without a ragged form decode one row at a time, with mlx-lm's own text."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.generator import SerialDecoder
from omlx_worker.engine.loading.loader import decoder_of, load, load_engine
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.row import Sampling
from tests.helpers.checkpoints import write_family
from tests.helpers.decoding import row, run
from tests.helpers.families import ALONE, SLIDING, tiny

EVERY_DAY = ("afm7", "gpt_bigcode")
PARAMETERS = [
    pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in ALONE
]
TOKENS = 40


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


PROMPTS = {"one": [7], "short": prompt(3), "longer": prompt(SLIDING + 9), "long": prompt(90)}


def greedy(model: nn.Module, tokens: list[int]) -> list[int]:
    return [token for token, _ in generate_step(mx.array(tokens), model, max_tokens=TOKENS)]


@pytest.mark.parametrize("family", PARAMETERS)
def test_a_checkpoint_without_a_ragged_form_gives_mlx_lms_own_text(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_family(tmp_path / family, family)
    with caplog.at_level(logging.WARNING):
        engine = load_engine(str(folder), max_rows=4)
    network, _, _ = load(folder)
    assert "one row at a time on mlx-lm's generate_step, slowly and without drafts" in caplog.text
    assert (engine.decoder.name, engine.max_rows, engine.max_depth) == ("generate_step", 1, 0)

    got: dict[str, list[int]] = {}
    for name, tokens in PROMPTS.items():
        request = GenerationRequest(
            model="m", prompt=tokens, max_completion_tokens=TOKENS, temperature=0, ignore_eos=True
        )
        [prepared] = engine.prepare(request, name)
        engine.add(prepared)
        engine.prefill({prepared.row_id: 1000})
        emissions = [engine.step() for _ in range(TOKENS)]
        got[name] = [token for [emission] in emissions for token in emission.tokens]
        assert engine.slots == 0
        assert engine.bytes_for([(len(tokens), len(tokens) + TOKENS)]) > 0

    assert got == {name: greedy(network, tokens) for name, tokens in PROMPTS.items()}


@pytest.mark.parametrize("family", PARAMETERS)
def test_rows_that_come_together_wait_for_each_other_and_have_their_own_texts(family: str) -> None:
    model = tiny(family)
    rows = [row(name, tokens, TOKENS) for name, tokens in PROMPTS.items()]

    got = run(SerialDecoder(model), rows, arrivals={"longer": 5}, departures={"short": 12})

    wanted = {name: greedy(model, tokens) for name, tokens in PROMPTS.items()}
    assert got == wanted | {"short": wanted["short"][:12]}


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, repetition_penalty=1.3, seed=8)])
def test_an_interrupted_row_goes_on_from_what_it_had_generated(sampling: Sampling) -> None:
    model = tiny("recurrent_gemma")
    whole = row("x", PROMPTS["short"], 24, sampling)
    wanted = run(SerialDecoder(model), [whole])["x"]

    for length in (1, 11, 23):
        rest = replace(whole, generated=tuple(wanted[:length]))
        decoder = SerialDecoder(model)
        decoder.add(rest)
        assert decoder.prefill({"x": 8}) == {"x": 0}
        steps = [step for _ in range(30) for step in decoder.step()]
        assert [token.token for step in steps for token in step.tokens] == wanted[length:]


def test_a_row_can_be_removed_before_and_while_it_decodes() -> None:
    model = tiny("llama")
    decoder = SerialDecoder(model)
    for name in ("waiting", "running", "next"):
        decoder.add(row(name, PROMPTS["short"], 20))
    decoder.remove("waiting")
    decoder.prefill({"running": 8, "next": 8})

    names = [step.row_id for _ in range(3) for step in decoder.step()]
    decoder.remove("running")
    decoder.remove("running")
    names += [step.row_id for _ in range(25) for step in decoder.step()]

    assert names == ["running"] * 3 + ["next"] * 20
    assert not decoder.suspend("next")


def test_a_model_with_which_mlx_lm_itself_fails_is_refused_by_name() -> None:
    model = tiny("llama")
    model.model_type = "brand_new"

    def fail(*_: object, **__: object) -> mx.array:
        raise ValueError("no such\nmask")

    with (
        patch.object(type(model), "__call__", fail),
        pytest.raises(
            ModelError, match=r"cannot generate with this brand_new \(ValueError: no such"
        ),
    ):
        decoder_of(model, max_rows=4, depth=0)


def test_the_check_leaves_nothing_in_the_model() -> None:
    model = tiny("llama")
    wanted = greedy(model, PROMPTS["short"])
    broken = patch.object(AttentionCache, "put", lambda *_: None)

    with broken:
        decoder = decoder_of(model, max_rows=4, depth=0)

    assert isinstance(decoder, SerialDecoder)
    assert run(decoder, [row("x", PROMPTS["short"], TOKENS)])["x"] == wanted
