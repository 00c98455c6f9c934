"""Windows of rows that begin are padded to a few shapes, and say what they say unpadded."""

from __future__ import annotations

import pytest

from omlx_worker.engine.ragged.first_windows import MOST, shape_for, shapes
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import Loaded, row


def test_a_window_is_padded_to_the_next_shape_unless_that_is_far_larger() -> None:
    assert shape_for(1, 3) == (1, 16)
    assert shape_for(1, 33) == (1, 48)
    assert shape_for(3, 16) == (4, 16)
    assert shape_for(1, 129) is None, "there is none"
    assert shape_for(5, 16) is None, "1.6 times as large"
    assert shape_for(16, 32) is None, "it holds enough"
    listed = shapes(32)
    assert len(listed) == 19
    assert max(rows * width for rows, width in listed) <= MOST
    met = {shape_for(rows, width) for rows in range(1, 33) for width in range(1, 300)}
    assert met <= {*listed, None}


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((2,), marks=pytest.mark.slow),
        (17,),
        pytest.param((100,), marks=pytest.mark.slow),
        (5, 12, 16),
        pytest.param((30, 40), marks=pytest.mark.slow),
    ],
)
def test_padded_prompts_continue_as_alone_and_a_shape_is_traced_once(
    qwen: Loaded, counts: tuple[int, ...]
) -> None:
    decoder = qwen.decoder(depth=1)
    prompts = {str(n): [(7 * n + 3 * at) % 250 for at in range(n)] for n in counts}
    wanted = {name: qwen.greedy(prompt, 6) for name, prompt in prompts.items()}
    for _ in range(2):
        rows = [Row(row(name, prompt, 6)) for name, prompt in prompts.items()]
        for each in rows:
            decoder.add(each)
        decoder.read(dict.fromkeys(rows, 512))
        assert decoder._halves.first_windows.traces == 1
        tokens: dict[str, list[int]] = {name: [] for name in prompts}
        while any(len(each) < 6 for each in tokens.values()):
            for step in decoder.step():
                tokens[step.row_id] += [sampled.token for sampled in step.tokens]
        assert {name: each[:6] for name, each in tokens.items()} == wanted
        for each in rows:
            decoder.leave(each)
