"""With fixed shapes a row has one text in half precision too, whatever happens beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_producer.wire import ModelInfo, RepetitionDetection
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.kernels.compiling import unfused
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.interface import FIXED_CHUNK
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import BULK, HIGH, Row
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import GREEDY, Loaded, enter
from tests.helpers.families import tiny

PLENTY = 1 << 30
SLOTS = 4
TOKENS = 150
"""More than a tail holds."""
HOT = Sampling(temperature=0.9, seed=5)
KINDS = [
    replace(each, top_logprobs=0)
    for each in (
        GREEDY,
        HOT,
        replace(HOT, filters={"top_p": 0.9}, repetition_penalty=1.2, seed=6),
        replace(GREEDY, presence_penalty=0.5, logit_bias={7: 1.5}),
    )
]

Texts = dict[str, list[tuple[int, float]]]
"""Tokens and their log-probabilities, which part long before a text does."""


@pytest.fixture(autouse=True)
def _unfused() -> Iterator[None]:
    """A CPU compiles fused operations for longer than these tests run."""
    with unfused():
        yield


class Worker:
    """A decode loop over a network in half precision.

    Args:
        fixed: whether shapes are fixed.
        prefixes: bytes of kept prompts.
    """

    def __init__(
        self,
        network: nn.Module,
        depth: int = 0,
        lookup: int = 0,
        *,
        fixed: bool = True,
        prefixes: int = 0,
        slots: int = SLOTS,
    ) -> None:
        contest = Contest(fixed=fixed)
        model = as_ragged(network, drafts=depth > 0, checks=False, kernels=for_device(contest))
        kept = partial(PrefixCache, LayerSpecs.of(model), prefixes) if prefixes else None
        decoder = RaggedDecoder(model, depth, lookup, kept, fixed=slots if fixed else 0)
        engine = DecodingEngine(
            *("tiny", decoder, Loaded.demo().tokenizer, cast(Any, None)),
            ModelInfo(model="tiny", context_length=4096, longest_token=1),
            max_rows=slots,
            repeats=fixed,
        )
        self.counters = Counters()
        self._loop = DecodeLoop(
            engine,
            MemoryBudget(PLENTY, 0, decoder.bytes_for),
            self.counters,
            driver=DepthDriver(FixedPolicy(max(depth, lookup))),
            chunks=ChunkSize(64, FIXED_CHUNK if fixed else 1),
        )

    def run(
        self,
        rows: Sequence[Row],
        arrivals: Mapping[str, int] | None = None,
        acts: int = 1 << 30,
    ) -> Texts:
        """What rows say within these acts of the loop.

        Args:
            arrivals: the act before which a row comes in; 0 for rows not named.
        """
        texts: Texts = {row.row_id: [] for row in rows}
        coming = {row: (arrivals or {}).get(row.row_id, 0) for row in rows}
        for act in range(acts):
            due = [row for row, at in coming.items() if at <= act]
            self._loop.add(due)
            coming = {row: at for row, at in coming.items() if row not in due}
            emissions = self._loop.act()
            if emissions is None and not coming:
                break
            for each in emissions or ():
                entries = [entry.logprob for entry in each.logprobs or ()]
                texts[each.row_id] += zip(each.tokens, entries, strict=True)
        return texts


def rows_of(count: int, tokens: int = TOKENS) -> list[Row]:
    """Rows with prompts of many lengths, every third of which begins alike."""
    chance, rows = random.Random(3), []
    beginning = [chance.randrange(250) for _ in range(300)]
    for n in range(count):
        own = [chance.randrange(250) for _ in range((1, 9, 150, 40)[n % 4])]
        prompt = (beginning if n % 3 == 0 else []) + own
        rows.append(Row(RowRequest(f"{n}", prompt, tokens + n, KINDS[n % len(KINDS)]), BULK))
    return rows


def alone(network: nn.Module, rows: Sequence[Row], *given: int, **options: Any) -> Texts:
    """What each row says in a worker of its own."""
    texts: Texts = {}
    for row in rows:
        texts |= Worker(network, *given, **options).run([row])
    return texts


def in_half(network: nn.Module, dtype: mx.Dtype = mx.bfloat16, bits: int = 0) -> nn.Module:
    network.set_dtype(dtype)
    if bits:
        nn.quantize(network, group_size=32, bits=bits)
    mx.eval(network.parameters())
    return network


def killed(rows: Sequence[Row]) -> list[Row]:
    """What another worker gets of rows whose worker was killed, in another order."""
    return [Row(row.request, row.level, row.text_tokens()) for row in reversed(rows)]


def joined(first: Texts, rest: Texts) -> Texts:
    return {name: first[name] + rest[name] for name in first}


def two_layers() -> nn.Module:
    network = tiny("llama")
    network.model.layers = network.model.layers[:2]
    return in_half(network)


def test_a_text_is_the_same_alone_in_company_and_after_a_kill() -> None:
    network, lookup = two_layers(), 2
    wanted = alone(network, rows_of(3, 20), 0, lookup)

    assert Worker(network, 0, lookup).run(rows_of(3, 20), {"1": 9, "2": 14}) == wanted

    rows = rows_of(3, 20)
    said = Worker(network, 0, lookup).run(rows, acts=16)
    assert any(0 < len(text) < 20 for text in said.values())
    assert joined(said, Worker(network, 0, lookup).run(killed(rows))) == wanted


def test_a_row_that_goes_on_with_a_penalty_is_the_same_after_a_kill() -> None:
    """One kill before the text repeats itself, one after the penalty began."""
    network = two_layers()
    loops = RepetitionDetection(max_pattern_size=1, min_count=6, repetition_penalty=1.2)
    [row] = rows_of(1, 30)
    looping = Row(replace(row.request, repetition=loops), BULK)
    wanted = Worker(network).run([looping])["0"]

    for acts, told in ((8, 4), (20, 12)):
        row = Row(looping.request, BULK)
        said = Worker(network).run([row], acts=acts)["0"]
        assert len(said) == told
        assert said + Worker(network).run(killed([row]))["0"] == wanted


CASES: dict[str, tuple[str, mx.Dtype, int, int, int]] = {
    "lookups": ("llama", mx.bfloat16, 0, 0, 3),
    "sliding windows": ("gemma3_text", mx.bfloat16, 0, 0, 0),
    "float16": ("llama", mx.float16, 0, 0, 0),
    "four bits": ("llama", mx.bfloat16, 4, 0, 3),
    "a convolution": ("lfm2", mx.bfloat16, 0, 0, 2),
    "a gated delta net and a head": ("qwen", mx.bfloat16, 0, 2, 0),
    "latents and experts": ("deepseek_v3", mx.float32, 0, 0, 0),
}
"""Families, types, bits, drafts of a head and drafts that are looked up. No product of experts in
half precision runs on a CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_beside_a_row_changes_its_text(case: str, tmp_path: Path) -> None:
    family, dtype, bits, *drafts = CASES[case]
    network = Loaded.at(write_qwen(tmp_path)).network if family == "qwen" else tiny(family)
    network = in_half(network, dtype, bits)
    wanted = alone(network, rows_of(5), *drafts)

    crowded = Worker(network, *drafts, prefixes=PLENTY)
    assert crowded.run(rows_of(5)) == wanted, "in company"
    assert crowded.run(rows_of(5), {str(n): 17 * (5 - n) for n in range(5)}) == wanted, "warm"
    assert crowded.counters.cached_tokens >= 2 * FIXED_CHUNK

    rows = rows_of(5)
    rows[4].level = HIGH
    suspending = Worker(network, *drafts)
    assert suspending.run(rows, {"4": 60}) == wanted, "after a suspension"
    assert suspending.counters.pauses == 1

    rows = rows_of(4)
    said = Worker(network, *drafts).run(rows, acts=90)
    rest = Worker(network, *drafts).run(killed(rows))
    assert joined(said, rest) == {name: wanted[name] for name in said}, "after a kill"


@pytest.mark.slow
def test_without_fixed_shapes_numbers_depend_on_company() -> None:
    network = two_layers()
    wanted = alone(network, rows_of(5), fixed=False)

    assert Worker(network, fixed=False).run(rows_of(5)) != wanted


def test_steps_have_one_shape_and_prompts_are_read_alone_from_fixed_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, reads = set[tuple[int, ...]](), set[tuple[int, int]]()
    forward = RaggedModel.forward

    def recorded(self: RaggedModel, tokens: mx.array, caches: Any, window: Window, *_: Any) -> Any:
        if window.lengths is None:
            steps.add(tokens.shape)
        else:
            reads.add((tokens.shape[0], window.longest % FIXED_CHUNK))
        return forward(self, tokens, caches, window, *_)

    worker = Worker(two_layers(), 0, 2, prefixes=PLENTY)
    monkeypatch.setattr(RaggedModel, "forward", recorded)
    worker.run(rows_of(5, 12), {"1": 9, "4": 20})

    assert steps == {(SLOTS, 3)}
    assert reads == {(1, 0)}
    assert worker.counters.cached_tokens == FIXED_CHUNK


def test_a_row_that_does_not_repeat_its_text_goes_on_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = two_layers()
    [row] = rows_of(1, 20)
    told = [3, 1, 4]

    rest = Worker(network).run([Row(row.request, BULK, list(told))])["0"]

    assert "row 0 does not repeat its text here" in caplog.text
    longer = replace(row.request, prompt=[*row.request.prompt, *told], max_tokens=17)
    wanted = Worker(network).run([Row(longer, BULK)])["0"]
    assert [token for token, _ in rest] == [token for token, _ in wanted]


def test_a_row_that_is_suspended_as_it_does_not_repeat_its_text_goes_on_from_it_when_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network, told = two_layers(), [3, 1, 4]
    request, urgent = (row.request for row in rows_of(3, 20)[1:])
    rows = [Row(request, BULK, told), Row(urgent, HIGH)]
    worker = Worker(network, slots=1)

    rest = worker.run(rows, {urgent.row_id: 3})

    assert worker.counters.pauses == 1
    assert f"row {request.row_id} does not repeat its text here" in caplog.text
    longer = replace(request, prompt=[*request.prompt, *told], max_tokens=request.max_tokens - 3)
    wanted = Worker(network, slots=1).run([Row(longer, BULK), Row(urgent, HIGH)])
    assert {name: [token for token, _ in text] for name, text in rest.items()} == {
        name: [token for token, _ in text] for name, text in wanted.items()
    }


def test_one_row_among_many_fixed_slots_never_waits_for_the_step_in_flight() -> None:
    decoder = RaggedDecoder(as_ragged(tiny("llama"), checks=False), fixed=8)
    enter(decoder, RowRequest("a", [5] * 20, 60, GREEDY))
    drains = decoder.drains

    for _ in range(40):
        decoder.step()

    assert decoder.drains == drains
