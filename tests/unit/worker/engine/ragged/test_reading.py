"""Prompts of several rows are read in one forward, and each row is left as if it were alone."""

from __future__ import annotations

import random
from itertools import chain
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from omlx_worker.engine.caches.layout import Pages
from omlx_worker.engine.kernels.window import PAGE
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import LayerCache, RaggedModel
from omlx_worker.engine.ragged import reading
from omlx_worker.engine.ragged.batch import Held
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import Loaded, row
from tests.helpers.families import SLIDING, tiny
from tests.helpers.readers import held

LENGTHS = (1, 2, 6, SLIDING - 1, SLIDING + 1, 2 * SLIDING + 3)
CHUNKS = (5, SLIDING, 100)
CLASSES = [
    "llama",
    "gemma3_text",
    "lfm2",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gpt_oss", "mamba", "mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1")
    ),
]


def readings() -> list[Reading]:
    made = []
    pages = Pages(len(LENGTHS))
    for length in LENGTHS:
        chance = random.Random(length)
        read = Row(row(str(length), [chance.randrange(256) for _ in range(length)], 8))
        read.pages = pages.take(1)
        made.append((read, Held()))
    return made


def read_together(model: RaggedModel, caches: list[LayerCache], rows: list[Reading]) -> None:
    """Read all of each prompt; the chunks get longer, and shorter rows end in each of them.

    Rows have different numbers of tokens behind them from the first.
    """
    for place, each in enumerate(rows):
        read(model, caches, [each], [min(place, each[0].left)])
    for chunk in CHUNKS:
        left = [each for each in rows if each[0].left]
        read(model, caches, left, [min(chunk, row.left) for row, _ in left])
    assert not any(row.left for row, _ in rows)


def check_like_alone(model: RaggedModel) -> None:
    sides = [(model.new_caches(len(LENGTHS), PAGE), readings()) for _ in range(2)]
    (shared, together), (others, alone) = sides
    read_together(model, shared, together)
    for each in alone:
        read_together(model, others, [each])
    for one, other in zip(together, alone, strict=True):
        got, wanted = chain(*held(one, shared)), chain(*held(other, others))
        for left, right in zip(got, wanted, strict=True):
            assert left.shape == right.shape
            assert mx.allclose(left, right, rtol=1e-4, atol=1e-4), one[0].length


@pytest.mark.parametrize("family", CLASSES)
def test_a_prompt_leaves_the_same_caches_read_with_others_as_alone(family: str) -> None:
    check_like_alone(as_ragged(tiny(family)))


def test_so_does_one_of_a_gated_delta_net_and_its_head(qwen: Loaded) -> None:
    check_like_alone(as_ragged(qwen.network))


def test_a_family_that_cannot_hold_its_state_reads_different_lengths_apart() -> None:
    model = as_ragged(tiny("mamba"))
    assert not model.pads
    check_like_alone(model)


def test_long_caches_are_put_side_by_side_a_few_at_a_time(qwen: Loaded) -> None:
    model = as_ragged(qwen.network)
    with patch.object(reading, "MOST_POSITIONS", 100):
        check_like_alone(model)


def test_rows_whose_prompts_are_read_together_join_with_mlx_lms_own_text() -> None:
    model = tiny("gemma3_text")
    decoder = RaggedDecoder(as_ragged(model))
    prompts = {row.row_id: row.tokens for row, _ in readings()}
    rows = [Row(row(name, prompt, 20)) for name, prompt in prompts.items()]
    for each in rows:
        decoder.add(each)
    decoder.read(dict.fromkeys(rows, 10))
    assert [each.left for each in rows] == [0, 0, 0, 12, 14, 40]
    decoder.read({each: 100 for each in rows if each.left})

    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(20):
        for step in decoder.step():
            tokens[step.row_id] += [sampled.token for sampled in step.tokens]

    for name, prompt in prompts.items():
        steps = generate_step(mx.array(prompt), model, max_tokens=19)
        assert tokens[name] == [token for token, _ in steps], name
