"""How drafts fared is counted by position, and told in one line."""

from __future__ import annotations

from omlx_worker.decode.counters import Counters, DraftCounts
from omlx_worker.engine.rows.emission import Emission


def emission(drafted: int, accepted: int) -> Emission:
    tokens = list(range(accepted + 1))
    return Emission("r", tokens, "x", drafted=drafted, accepted=accepted)


def test_accepted_drafts_are_counted_by_position() -> None:
    counts = DraftCounts()
    for drafted, accepted in ((0, 0), (3, 3), (3, 1), (1, 0)):
        counts.add(emission(drafted, accepted))

    assert counts.accepted == [2, 1, 1]
    assert counts.acceptance == 4 / 7
    wire = counts.to_wire()
    assert (wire.steps, wire.drafted, wire.accepted) == (4, 7, [2, 1, 1])


def test_a_worker_without_drafts_does_not_speak_of_them() -> None:
    counters = Counters(steps=4, decode_rows=8, tokens=8)
    assert str(counters) == "8 tokens in 4 steps, mean batch 2.0, prompts in 0 windows"
    counters.drafts.add(emission(2, 1))
    assert str(counters).endswith("; 50% of 2 drafts accepted (by position: 1, 0)")
