"""A model without a ragged form runs through mlx-lm's BatchGenerator behind the same engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omlx_producer.protocol import GenerationRequest
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.generator import GeneratorDecoder
from omlx_worker.engine.interface import Sampling
from omlx_worker.engine.loader import load_engine
from tests.helpers.decoding import Loaded, row, run

PROMPTS = ([5, 6, 7], [9], list(range(40, 75)), [250, 3])


@pytest.fixture(scope="module")
def llama(llama_path: Path) -> Loaded:
    return Loaded.at(llama_path)


def test_a_llama_decodes_greedily_as_mlx_lm_does_with_staggered_arrivals(llama: Loaded) -> None:
    wanted = {str(i): llama.greedy(prompt, 30) for i, prompt in enumerate(PROMPTS)}

    got = run(
        GeneratorDecoder(llama.network, max_rows=4, prefill_chunk=8),
        [row(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)],
        arrivals={"1": 4, "3": 11},
    )

    assert got == wanted


def test_a_seeded_row_of_a_llama_draws_the_same_tokens_in_any_company(llama: Loaded) -> None:
    hot = Sampling(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=3)
    alone = run(GeneratorDecoder(llama.network, max_rows=4), [row("x", PROMPTS[0], 25, hot)])

    others = [row(str(i), p, 12, Sampling(seed=i)) for i, p in enumerate(PROMPTS)]
    together = run(GeneratorDecoder(llama.network, 8), [*others, row("x", PROMPTS[0], 25, hot)])

    assert together["x"] == alone["x"]


def test_a_row_can_be_removed_before_and_while_it_decodes(llama: Loaded) -> None:
    decoder = GeneratorDecoder(llama.network, max_rows=4)
    for name in ("waiting", "running", "kept"):
        decoder.add(row(name, PROMPTS[0], 20))
    decoder.remove("waiting")
    decoder.prefill("running", 8)
    decoder.prefill("kept", 8)

    first = decoder.step()
    decoder.remove("running")
    rest = [sampled.row_id for _ in range(25) for sampled in decoder.step()]

    assert {sampled.row_id for sampled in first} == {"running", "kept"}
    assert set(rest) == {"kept"}
    assert len(rest) == 19


def test_the_engine_serves_a_llama_like_any_other_model(llama_path: Path) -> None:
    engine: DecodingEngine = load_engine(str(llama_path), max_rows=4)
    request = GenerationRequest(
        model="m", prompt="abc", max_completion_tokens=6, logprobs=True, top_logprobs=2
    )
    [prepared] = engine.prepare(request, "job")
    engine.add(prepared)
    assert engine.prefill(prepared.row_id, 100) == 0

    emissions = [emission for _ in range(10) for emission in engine.step()]

    assert sum(len(emission.tokens) for emission in emissions) <= 6
    assert emissions[-1].finish_reason in {"length", "stop"}
    for emission in emissions:
        assert emission.logprobs is not None
        assert [entry.token_id for entry in emission.logprobs] == emission.tokens
        assert all(len(entry.top) == 2 for entry in emission.logprobs)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, repetition_penalty=1.3, seed=8)])
def test_an_interrupted_row_of_a_llama_goes_on_from_what_it_had_generated(
    llama: Loaded, sampling: Sampling
) -> None:
    whole = row("x", PROMPTS[2], 24, sampling)
    wanted = run(GeneratorDecoder(llama.network, max_rows=4), [whole])["x"]

    for length in (1, 11, 23):
        rest = replace(whole, generated=tuple(wanted[:length]))
        decoder = GeneratorDecoder(llama.network, max_rows=4)
        decoder.add(rest)
        assert decoder.prefill("x", 8) == 0
        steps = [step for _ in range(30) for step in decoder.step()]

        assert [token.token for step in steps for token in step.tokens] == wanted[length:]


def test_a_row_of_a_llama_cannot_be_suspended(llama: Loaded) -> None:
    decoder = GeneratorDecoder(llama.network, max_rows=4)
    decoder.add(row("x", PROMPTS[0], 20))
    decoder.prefill("x", 8)
    decoder.step()

    assert not decoder.suspend("x")
    with pytest.raises(KeyError):
        decoder.resume("x")
    assert len(decoder.step()) == 1
