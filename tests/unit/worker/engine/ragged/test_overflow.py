"""Rows whose numbers overflow, as they may in half precision, spoil nothing but themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_worker.engine.kernels.compiling import unfused
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.decoding import enter
from tests.helpers.decoding import row as row_of
from tests.helpers.families import tiny

SPOILT = 7
"""A token whose embedding is not a number."""

PROMPT, TOKENS = [5, 6, 8, 9], 12


@pytest.fixture(params=["llama", "gemma3_text", "deepseek_v3", "lfm2"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    return tiny(request.param)


@contextmanager
def overflow(network: nn.Module) -> Iterator[None]:
    """Inside of the block, the embedding of `SPOILT` is not a number."""
    inner = getattr(network, "language_model", network)
    # In its place, since the model that decodes has a module of its own with the same array.
    table = inner.model.embed_tokens.weight
    whole = mx.array(table[SPOILT])
    table[SPOILT] = mx.nan
    yield
    table[SPOILT] = whole


def play(decoder: RaggedDecoder, name: str, tokens: int) -> list[int]:
    made = list[int]()
    while len(made) < tokens:
        for step in decoder.step():
            if step.row_id == name:
                made += [sampled.token for sampled in step.tokens]
    return made[:tokens]


def alone_in(network: nn.Module) -> tuple[RaggedDecoder, list[int]]:
    """A decoder without rows, and what `PROMPT` has there alone."""
    decoder = RaggedDecoder(as_ragged(network, drafts=False, checks=False))
    row = enter(decoder, row_of("alone", PROMPT, TOKENS))
    alone = play(decoder, "alone", TOKENS)
    decoder.leave(row)
    return decoder, alone


@pytest.mark.parametrize("where", ["in the prompt", "while it decodes"])
def test_the_next_row_in_its_slot_has_the_text_that_it_has_alone(
    network: nn.Module, where: str
) -> None:
    with unfused():
        decoder, alone = alone_in(network)

        enter(decoder, row_of("company", [1, 2, 3], 400))
        with overflow(network):
            spoilt = enter(decoder, row_of("spoilt", [1, SPOILT, 3, 4, 1, 2, 3, 4, 5], 60))
            if where == "while it decodes":
                decoder.state["pending"][spoilt.slot] = SPOILT
            for _ in range(6):
                decoder.step()
            decoder.leave(spoilt)
        enter(decoder, row_of("next", PROMPT, TOKENS))

        assert play(decoder, "next", TOKENS) == alone


# Those of other models take their scores from the same array.
@pytest.mark.parametrize("network", ["gemma3_text", "deepseek_v3"], indirect=True)
def test_the_rows_beside_it_have_the_text_that_they_have_alone(network: nn.Module) -> None:
    with unfused():
        decoder, alone = alone_in(network)

        with overflow(network):
            spoilt = enter(decoder, row_of("spoilt", [1, 2, 3, 4] * 50, 60))
            enter(decoder, row_of("beside", PROMPT, TOKENS))
            decoder.state["pending"][spoilt.slot] = SPOILT

            assert play(decoder, "beside", TOKENS) == alone
