"""Any family of mlx-lm decodes on the ragged batch as it does alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ConcatenateKVCache

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import pages_for
from omlx_worker.engine.kernels.attention import Heads
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.pool import Pair
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window, own_pages
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.self_check import difference
from omlx_worker.engine.models.ragged_model import RaggedModel, Unsupported
from omlx_worker.engine.ragged import lookups
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.lookups import LEAD
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.decoding import enter, row, run
from tests.helpers.families import FAMILIES, RECURRENT, SLIDING, tiny

pytestmark = pytest.mark.usefixtures("small_buckets")

EVERY_DAY = ("llama", "gpt_neox", "gpt2", "gemma3_text", "lfm2")
PARAMETERS = [
    pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow)
    for name in FAMILIES | RECURRENT
]
SEEDED_TOO = ("llama", "gpt_oss", "lfm2", "mamba2", "falcon_h1", "deepseek_v3")
EXACT = 1e-5

write = AttentionCache.put


def greedy(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("family", PARAMETERS)
def test_windows_at_different_cursors_score_as_a_plain_forward_does(family: str) -> None:
    model = tiny(family)

    assert difference(model, RaggedModel(model, Kernels())) < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"])
def test_hidden_states_are_scored_as_the_model_itself_does_and_a_part_of_them_too(
    family: str,
) -> None:
    model = tiny(family)
    ragged, none = RaggedModel(model, Kernels()), mx.zeros((1,), mx.int32)
    tokens, caches = mx.array([[3, 1, 4, 1]]), ragged.new_caches(1, TAIL)
    window = Window.at(none, none, 4, own_pages(1, pages_for(TAIL)))

    hidden = ragged.forward(tokens, caches, window, none)

    assert hidden.shape == (1, 4, 64)
    wanted = model(tokens)
    assert mx.allclose(ragged.logits(hidden), wanted, atol=EXACT)
    assert mx.allclose(ragged.logits(hidden[0, 1:3]), wanted[0, 1:3], atol=EXACT)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "lfm2", "mixtral"])
def test_queries_keys_and_values_of_families_that_are_alike_are_one_projection(
    family: str,
) -> None:
    model, widths = tiny(family), list[int]()

    class Whole(PlainAttention):
        def prepare(
            self, projected: mx.array, heads: Heads, tails: Pair, window: Window
        ) -> tuple[mx.array, Pair]:
            widths.append(projected.shape[-1])
            return super().prepare(projected, heads, tails, window)

    ragged = RaggedModel(model, Kernels(Whole()))

    assert difference(model, ragged) < EXACT
    assert set(widths) == {(4 + 2 + 2) * 16}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "gemma3_text" else pytest.mark.slow)
        for name in FAMILIES | RECURRENT
    ],
)
def test_greedy_rows_equal_mlx_lm_with_staggered_arrivals(family: str) -> None:
    model = tiny(family)
    ragged = as_ragged(model)
    given = {
        "one": [7],
        "short": prompt(3, 1),
        "longer": prompt(SLIDING + 9, 2),
        "long": prompt(90, 3),
    }
    wanted = {name: greedy(model, tokens, 64) for name, tokens in given.items()}
    wanted["short"] = wanted["short"][:30]

    for lookup in (0, 3):
        got = run(
            RaggedDecoder(ragged, lookup=lookup),
            [row(name, tokens, 64) for name, tokens in given.items()],
            arrivals={"longer": 5, "long": 11},
            departures={"short": 30},
        )
        assert got == wanted, lookup


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gemma3_text",
        "gpt_oss",
        "lfm2",
        "mamba2",
        "nemotron_h",
        "granitemoehybrid",
        "falcon_h1",
    ],
)
def test_rows_stay_exact_when_tails_fold_and_rows_are_suspended(family: str) -> None:
    model = tiny(family)
    given = {"a": prompt(5, 4), "b": prompt(70, 5)}
    tokens = TAIL + 2 * SLIDING + 7
    wanted = {name: greedy(model, start, tokens) for name, start in given.items()}
    decoder = RaggedDecoder(RaggedModel(model, Kernels()), lookup=3)
    steps: dict[str, list[int]] = {name: [] for name in given}
    entered = {name: enter(decoder, row(name, start, tokens)) for name, start in given.items()}

    def decode(count: int) -> None:
        # Of either number of drafts some, so that both are in windows of either width.
        for step in range(count):
            for outcome in decoder.step(step // 7 % 2 * 3):
                steps[outcome.row_id] += [sampled.token for sampled in outcome.tokens]

    decode(40)
    decoder.suspend(entered["b"])
    decode(TAIL)
    decoder.resume(entered["b"])
    decode(TAIL + 40)

    assert {name: got[:tokens] for name, got in steps.items()} == wanted


def knowing(texts: list[list[int]]) -> Callable[..., tuple[mx.array, mx.array]]:
    """A search that finds these texts. Their first tokens differ."""
    longest = max(map(len, texts)) + MAX_DRAFT_DEPTH
    known = mx.array([text + [0] * (longest - len(text)) for text in texts], mx.int32)

    def search(
        history: mx.array, cursors: mx.array, depth: int, _: int
    ) -> tuple[mx.array, mx.array]:
        mine = history[:, LEAD : LEAD + 1] == known[:, 0]
        after = mx.minimum(cursors[:, None] + mx.arange(1, 1 + depth), longest - 1)
        return mx.take_along_axis(known[mx.argmax(mine, axis=1)], after, axis=1), mine.any(axis=1)

    return search


@pytest.mark.parametrize(
    "family",
    ["gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in SEEDED_TOO)],
)
def test_a_seed_gives_one_text_at_every_depth_and_in_company(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = as_ragged(tiny(family))
    seeded = Sampling(temperature=0.8, filters={"top_p": 0.95}, seed=7)
    a, b = (row(name, prompt(n, n), 40, seeded) for name, n in (("a", 5), ("b", SLIDING + 9)))
    alone = run(RaggedDecoder(ragged), [a]) | run(RaggedDecoder(ragged), [b])
    looking = RaggedDecoder(ragged, lookup=3)
    texts = [[*each.prompt, *alone[each.row_id]] for each in (a, b)]
    monkeypatch.setattr(lookups, "search", knowing(texts))

    assert run(RaggedDecoder(ragged), [a, b], arrivals={"b": 4}) == alone
    assert run(looking, [a, b], arrivals={"b": 4}) == alone
    assert looking.reads < 40


def test_a_sliding_layer_keeps_no_more_than_its_ring() -> None:
    caches = RaggedModel(tiny("gemma3_text"), Kernels()).new_caches(2, 1024)

    lengths = [cache.pool.length for cache in caches if isinstance(cache, AttentionCache)]

    assert lengths == [SLIDING, PAGE, SLIDING, PAGE]


def put_no_keys(cache: AttentionCache, keys: mx.array, values: mx.array, window: Window) -> None:
    write(cache, mx.zeros_like(keys), values, window)


def test_a_model_whose_windows_differ_from_its_forward_is_refused_with_the_reason() -> None:
    broken = patch.object(AttentionCache, "put", put_no_keys)

    with broken, pytest.raises(Unsupported, match="differs from a plain forward"):
        as_ragged(tiny("llama"))


def test_a_family_with_another_kind_of_state_is_refused() -> None:
    model = tiny("llama")
    model.make_cache = lambda: [ConcatenateKVCache() for _ in model.layers]

    with pytest.raises(Unsupported, match="its layers keep a ConcatenateKVCache"):
        as_ragged(model)


def test_a_model_whose_modules_read_values_on_the_host_is_refused() -> None:
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = lambda x: mlp(x) + 0.0 * sum(x[0, 0].tolist())

    with pytest.raises(Unsupported, match="cannot run a ragged window"):
        as_ragged(model)


def test_a_model_whose_forward_fails_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp = None

    with pytest.raises(Unsupported, match="its forward fails"):
        as_ragged(model)
