"""Compares a ragged form with the model's own forward, on the loaded weights and this device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from omlx_worker.engine.caches.layout import Pages, Seat, indices, pages_for
from omlx_worker.engine.kernels.compiling import unfused
from omlx_worker.engine.kernels.window import TAIL, Window, own_pages, table_of
from omlx_worker.engine.models.ragged_model import LayerCache, Layers, RaggedModel, Unsupported
from omlx_worker.engine.ragged.batch import Held
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row

log = logging.getLogger(__name__)

_PROMPTS = (3, 11)
_STRETCHES = ((1, 4), (2, 7))  # tokens of the prompts that are read together
_WINDOWS = ((4, (1, 3)), (1, (1, 1)), (4, (4, 1)), (2, (2, 2)))
"""Widths, and how many tokens of each row's window are committed.

The first of them commit less and more than a replay of one draft, so that a fault in either shows
in enough of the positions that follow."""
_LEAST, _MOST = 1e-2, 1.0
"""Differences that are never a fault, and always one: logits of another model are 1.4 apart.

In the demo model an accepted draft that is not replayed makes 0.03, and keys that are not written
make 0.25."""
_TIMES_ROUNDING = 2
"""How far the two may be apart, in steps of `rounding`.

With random weights in the shapes of a Qwen3.5 of 8 to 64 layers and of a Llama of 32, in half
precision and with 4 bits, they are 0.2 to 0.8 of one apart on a CPU."""
_ODD_SHARE = 0.25
"""Share of positions that may differ more: where experts' scores tie, rounding chooses."""


def check(model: nn.Module, ragged: RaggedModel) -> None:
    """Compare a ragged form with the model's own forward.

    Raises:
        Unsupported: if they disagree, or if the model's modules cannot run a ragged window.
    """
    try:
        with unfused():
            found = difference(model, ragged)
            explained = rounding(model, ragged.vocabulary, ragged.dtype)
            near = min(max(_LEAST, _TIMES_ROUNDING * explained), _MOST)
        _trace(ragged)
    except Exception as error:  # a family's own code may raise anything
        log.debug("the self-check failed", exc_info=True)
        reason = f"its modules cannot run a ragged window ({type(error).__name__})"
        raise Unsupported(reason) from error
    if not found <= near:
        raise Unsupported(
            f"a ragged window differs from a plain forward by {found:.0%}, and rounding explains"
            f" {near:.0%}"
        )


def difference(model: nn.Module, ragged: RaggedModel) -> float:
    """How far the logits of ragged windows are from those of a plain forward.

    Two prompts are read together, in two stretches, then windows of 1 to 4 tokens run at different
    cursors, with different numbers of tokens committed.

    Returns:
        The distance at the upper quartile of positions, as a share of the logits' own spread.
    """
    prompts = [_tokens(ragged.vocabulary, n, seed) for seed, n in enumerate(_PROMPTS)]
    caches, table = _read(ragged, prompts)
    lengths = mx.array(_PROMPTS, mx.int32)
    cursors, distances = lengths, []
    accepted = mx.zeros_like(lengths)
    for number, (width, committed) in enumerate(_WINDOWS):
        tokens = [_tokens(ragged.vocabulary, width, 100 * number + slot) for slot in (0, 1)]
        window = Window.at(cursors, lengths, width, table)
        got = ragged.logits(ragged.forward(mx.stack(tokens), caches, window, accepted))
        for slot, text in enumerate(tokens):
            whole = mx.concatenate([prompts[slot], text])[None]
            wanted = model(whole, cache=make_prompt_cache(model))[0, -width:]
            distances += list(_distances(got[slot], wanted))
            prompts[slot] = mx.concatenate([prompts[slot], text[: committed[slot]]])
        accepted = mx.array(committed, mx.int32) - 1
        cursors = cursors + mx.array(committed, mx.int32)
        mx.eval([cache.arrays for cache in caches])
    return _upper_quartile(distances)


def rounding(model: nn.Module, vocabulary: int, dtype: mx.Dtype) -> float:
    """How far logits move when each number of the tokens' embeddings is rounded the other way.

    Deep networks, few bits and experts make much of a rounding, so no fixed distance tells one
    from a fault. Measured in the model's own precision, by its own forward, as `difference` is.
    """
    text = _tokens(vocabulary, _PROMPTS[-1] + _WINDOWS[0][0], 0)[None]
    plain = model(text, cache=make_prompt_cache(model))[0]
    with _nudged_embeddings(mx.finfo(dtype).eps):
        nudged = model(text, cache=make_prompt_cache(model))[0]
    return _upper_quartile(list(_distances(nudged, plain)))


@contextmanager
def _nudged_embeddings(step: float) -> Iterator[None]:
    """Let embeddings be this share larger or smaller, number by number, inside of the block."""
    with ExitStack() as restoring:
        for kind in (nn.Embedding, nn.QuantizedEmbedding):
            restoring.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = _nudged(kind.__call__, step)
        yield


def _nudged(embed: Callable[..., mx.array], step: float) -> Callable[..., mx.array]:
    def nudged(module: nn.Module, tokens: mx.array) -> mx.array:
        x = embed(module, tokens)
        larger = mx.random.bernoulli(shape=x.shape, key=mx.random.key(0))
        return x * mx.where(larger, 1 + step, 1 - step).astype(x.dtype)

    return nudged


def _trace(ragged: RaggedModel) -> None:
    """Run one window as a compiled step does, which fails if a module reads values on the host."""
    arrays = [cache.arrays for cache in ragged.new_caches(1, TAIL)]
    none = mx.zeros((1,), mx.int32)

    def forward(tokens: mx.array, none: mx.array, arrays: Layers) -> mx.array:
        caches = ragged.wrap(arrays)
        window = Window.at(none, none, tokens.shape[1], own_pages(1, pages_for(TAIL)))
        return ragged.logits(ragged.forward(tokens, caches, window, none))

    # Never evaluated: tracing is enough.
    mx.compile(forward)(mx.zeros((1, 2), mx.int32), none, arrays)


def _read(ragged: RaggedModel, prompts: Sequence[mx.array]) -> tuple[list[LayerCache], mx.array]:
    """Caches with a slot for each of these prompts, and the table of their pages."""
    caches, each = ragged.new_caches(len(prompts), TAIL), pages_for(TAIL)
    pages, readings = Pages(len(prompts) * each), list[Reading]()
    for prompt in prompts:
        history = [*prompt.tolist(), 0]  # type: ignore[misc]
        row = Row(RowRequest("", history, 1, Sampling()))
        row.pages = pages.take(each)
        readings.append((row, Held()))
    for counts in _STRETCHES:
        read(ragged, caches, readings, counts)
    for slot, (_, held) in enumerate(readings):
        for cache, part in zip(caches, held.layers, strict=True):
            cache.write(Seat(slot), part)
    return caches, table_of([indices(row.pages) for row, _ in readings], each)


def _tokens(vocabulary: int, count: int, seed: int) -> mx.array:
    return mx.random.randint(0, vocabulary, (count,), key=mx.random.key(seed))


def _upper_quartile(distances: list[float]) -> float:
    return sorted(distances)[int(len(distances) * (1 - _ODD_SHARE))]


def _distances(got: mx.array, wanted: mx.array) -> Iterator[float]:
    """The distance of each position's logits, ``[W, V]`` both."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    spread = mx.std(wanted, axis=-1) + 1e-9
    apart = mx.sqrt(mx.mean((got - wanted) ** 2, axis=-1)) / spread
    yield from apart.tolist()  # type: ignore[misc]
