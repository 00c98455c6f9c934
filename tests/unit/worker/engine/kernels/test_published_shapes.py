"""Metal's kernels, emulated, at the shapes of published models, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from omlx_worker.engine.kernels import attention_kernel, delta_kernel, net_kernels
from omlx_worker.engine.kernels.attention import Heads
from omlx_worker.engine.kernels.attention_kernel import AttentionKernel
from omlx_worker.engine.kernels.delta_kernel import DeltaKernel
from omlx_worker.engine.kernels.delta_rule import Inputs
from omlx_worker.engine.kernels.net_kernels import NetKernels
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations
from omlx_worker.engine.kernels.pool import Pool
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window, own_pages
from omlx_worker.engine.models.rotary import rope_of
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import Fault, needs_compiler

pytestmark = needs_compiler

DTYPES = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Types, and how far a number may be from its rounding, relative to it."""

WIDTHS = range(1, 10)


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate Metal."""
    for module in (attention_kernel, delta_kernel, net_kernels):
        monkeypatch.setattr(module, "launch", emulator.launch)


def noise(rng: np.random.Generator, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def exactly(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def assert_rounded(got: mx.array, wanted: np.ndarray) -> None:
    """Check that numbers are the wanted ones, but for float32's sums and one rounding."""
    off = np.abs(exactly(got) - wanted)
    allowed = 1.01 * DTYPES[got.dtype] * np.abs(wanted) + 3e-5
    assert np.all(off <= allowed), f"off by {off.max()}"


@dataclass(frozen=True)
class Layer:
    """An attention layer: query heads of a key head, their size, and its peculiarities."""

    group: int
    size: int
    sliding: int = 0
    sinks: bool = False
    softcap: float = 0.0


LAYERS = {
    "Qwen3.5 0.8B and 4B": Layer(4, 256),
    "Qwen3.5 27B": Layer(6, 256),
    "Qwen3.5 35B-A3B": Layer(8, 256),
    "Llama 8B, Phi 4": Layer(4, 128),
    "Qwen3 0.6B": Layer(2, 128),
    "Gemma 3, global": Layer(2, 256),
    "Gemma 3, sliding": Layer(2, 256, sliding=512),
    "Gemma 2": Layer(2, 256, softcap=50.0),
    "gpt-oss, full": Layer(8, 64, sinks=True),
    "gpt-oss, sliding": Layer(8, 64, sliding=128, sinks=True),
    "GLM 4": Layer(16, 128),
    "Phi 3": Layer(1, 96),
    "Phi 2": Layer(1, 80),
}

HEADS = 2
"""Key heads, fewer than those models have: they differ in nothing but their numbers."""


def steps() -> Iterator[object]:
    """Every layer with every width; types in turn. All but two are slow."""
    quick = {("Llama 8B, Phi 4", 3), ("gpt-oss, sliding", 1)}
    for at, (name, width) in enumerate(product(LAYERS, WIDTHS)):
        dtype = list(DTYPES)[(at + at // len(WIDTHS)) % 3]
        yield pytest.param(
            *(LAYERS[name], width, dtype),
            id=f"{name}, {width}, {str(dtype).removeprefix('mlx.core.')}",
            marks=[] if (name, width) in quick else pytest.mark.slow,
        )


@pytest.mark.parametrize(("layer", "width", "dtype"), [*steps()])
def test_a_step_attends_as_float64_does(layer: Layer, width: int, dtype: mx.Dtype) -> None:
    check_step(layer, width, dtype, long=2100 if width % 4 == 1 else 600)


def check_step(layer: Layer, width: int, dtype: mx.Dtype, long: int) -> None:
    """Write tails and attend, with rows of lengths up to this one."""
    rng = np.random.default_rng(width)
    # Bodies' lengths, and positions of the tail: none, one, those around an edge, and many.
    capacity = 4096
    # Behind the last of them lies no memory.
    rows = [(0, 0), (1, 1), (long, 7), (255, TAIL - width)]
    lengths = np.array([length for length, _ in rows])
    cursors = lengths + [filled for _, filled in rows]
    many, ring = len(rows), layer.sliding
    order = rng.permutation(many * capacity // PAGE)
    table = mx.array(order.reshape(many, -1), mx.int32)
    window = Window.at(mx.array(cursors, mx.int32), mx.array(lengths, mx.int32), width, table)
    first, length = (many, min(capacity, ring)) if ring else (order.size, PAGE)
    pool = Pool([noise(rng, dtype, first, HEADS, length, layer.size) for _ in "kv"], ring)
    whole = pool.gather() if ring else pool.bodies(table)
    tails = tuple(noise(rng, dtype, many, HEADS, TAIL, layer.size) for _ in "kv")
    new = [noise(rng, dtype, many, HEADS, width, layer.size) for _ in "kv"]
    queries = noise(rng, dtype, many, HEADS * layer.group, width, layer.size)
    sinks = noise(rng, dtype, HEADS * layer.group) if layer.sinks else None
    kernel, scale = AttentionKernel("metal"), layer.size**-0.5

    written = kernel.put(tails, *new, window)
    mixed = kernel.attend(
        *(queries, pool, written, window, scale),
        **{"sliding": layer.sliding, "sinks": sinks, "softcap": layer.softcap},
    )

    for tail, old, fresh in zip(written, tails, new, strict=True):
        wanted = exactly(old)
        for row, (_, filled) in enumerate(rows):
            wanted[row, :, filled : filled + width] = exactly(fresh)[row]
        assert np.array_equal(exactly(tail), wanted), "a tail is off by some position"
    for row, (length, cursor) in enumerate(zip(lengths, cursors, strict=True)):
        body, slot = whole, row
        positions = np.arange(max(0, length - body[0].shape[2]), length)
        held = positions % body[0].shape[2]
        keys, values = (
            np.concatenate([exactly(part)[slot][:, held], exactly(tail)[row]], axis=1)
            for part, tail in zip(body, written, strict=True)
        )
        at = np.concatenate([positions, length + np.arange(TAIL)])
        wanted = attended(exactly(queries)[row], keys, values, at, cursor, layer, sinks)
        assert_rounded(mixed[row], wanted)


PLANTED = {
    "no barrier": ("BARRIER;", "", r"reads \w+\[\d+\] before it is written"),
    "a barrier for some lanes": (
        "SHARED float sums",
        "if (taken) BARRIER; SHARED float sums",
        "divergent barrier",
    ),
    "sums of all lanes in one place": ("if (taken == 0) {", "{", r"race: writes sums"),
    "no lane 0 in an exchange": (
        "for (int offset = Lanes; offset < Simd;",
        "if (lane) for (int offset = Lanes; offset < Simd;",
        "lane 0 of its simdgroup, which does not take part",
    ),
    "a position past the last": (
        "at = base + taken < to ? base + taken : base;",
        "at = base + taken;",
        "reads outside of tail_keys",
    ),
    "a mask off by one": ("position <= place[j]", "position < place[j]", "off by"),
    "a window off by one": ("place[j] - Sliding", "place[j] - Sliding - 1", "off by"),
    "a query that is left out": ("number >= count", "number >= count - 1", "never writes mixed"),
    "a part too many": ("s < splits", "s <= splits", "reads outside of weighed"),
    "a position too many of the tail": ("place < width", "place <= width", "off by|reads outside"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong", "told"), PLANTED.values(), ids=PLANTED)
def test_a_fault_planted_in_attention_is_seen(
    right: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, attention_kernel, right, wrong)

    def check() -> None:
        for sliding in (100, 0):
            check_step(Layer(4, 64, sliding), 3, mx.float32, long=600)

    with pytest.raises((AssertionError, Fault), match=told):
        check()


def plant(monkeypatch: pytest.MonkeyPatch, module: ModuleType, right: str, wrong: str) -> None:
    """Replace code in a module's kernels; it is in one of them."""

    def launch(platform: str, name: str, source: str, *rest: Any, **options: Any) -> Any:
        return emulator.launch(platform, name, source.replace(right, wrong), *rest, **options)

    monkeypatch.setattr(module, "launch", launch)


def attended(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    cursor: int,
    layer: Layer,
    sinks: mx.array | None,
) -> np.ndarray:
    """What one row's queries ``[Hq, W, D]`` see of keys at these positions, in float64."""
    own = cursor + np.arange(queries.shape[1])[:, None]
    seen = positions <= own
    if layer.sliding:
        seen &= positions > own - layer.sliding
    mixed = np.zeros(queries.shape)
    for head, query in enumerate(queries):
        scores = query @ keys[head // layer.group].T * layer.size**-0.5
        if layer.softcap:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        weights = np.where(seen, np.exp(scores), 0.0)
        mass = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            mass += np.exp(exactly(sinks)[head])
        mixed[head] = weights @ values[head // layer.group] / mass
    return mixed


NETS = {"Qwen3.5 0.8B": 1, "Qwen3.5 4B and 35B-A3B": 2, "Qwen3.5 27B": 3}
"""Value heads of a key head in models' gated delta nets. Their heads have 128 numbers."""


def windows() -> Iterator[object]:
    """Every net with every width, with drafts accepted before or without; one is quick."""
    for at, (name, width) in enumerate(product(NETS, WIDTHS)):
        dtype = list(DTYPES)[(at + at // len(WIDTHS)) % 3]
        depth = at * 2 % 5
        yield pytest.param(
            *(NETS[name], width, depth, dtype),
            id=f"{name}, {width} after {depth}, {str(dtype).removeprefix('mlx.core.')}",
            marks=[] if (name, width) == ("Qwen3.5 27B", 2) else pytest.mark.slow,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("t == commit", "t == commit - 1", "off by|never writes committed"),
        ("if (lane == 0) outputs", "outputs", "race: writes outputs"),
        ("1 + replays + t", "replays + t", "off by"),
        ("offset > 0", "offset > 1", "off by"),
        ("t < width", "t <= width", "race: writes outputs"),
    ],
)
def test_a_fault_planted_in_a_net_is_seen(
    right: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, delta_kernel, right, wrong)
    with pytest.raises((AssertionError, Fault), match=told):
        check_net(2, 3, 2, mx.float32)


def net_inputs(
    rng: np.random.Generator, dtype: mx.Dtype, slots: int, width: int, group: int
) -> Inputs:
    def unit() -> mx.array:
        vectors = rng.normal(size=(slots, width, HEADS, 128))
        return mx.array(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(dtype)

    gates = slots, width, HEADS * group
    return Inputs(
        unit(),
        unit(),
        noise(rng, dtype, *gates, 128),
        mx.array(np.exp(-rng.exponential(size=gates)), mx.float32),
        mx.array(rng.uniform(size=gates), mx.float32).astype(dtype),
    )


@pytest.mark.parametrize(("group", "width", "depth", "dtype"), [*windows()])
def test_a_net_replays_and_runs_as_float64_does(
    group: int, width: int, depth: int, dtype: mx.Dtype
) -> None:
    check_net(group, width, depth, dtype)


def check_net(group: int, width: int, depth: int, dtype: mx.Dtype) -> None:
    """Run a window, after one of which all drafts were accepted in one of two slots."""
    rng = np.random.default_rng(width)
    accepted = [0, depth]
    past = net_inputs(rng, dtype, 2, 1 + depth, group)
    given = net_inputs(rng, dtype, 2, width, group)
    state = mx.array(rng.normal(size=(2, HEADS * group, 128, 128)), mx.float32)

    outs, committed = DeltaKernel("metal").replay_and_run(
        given, past.kept if depth else None, mx.array(accepted, mx.int32), state
    )

    for slot, count in enumerate(accepted):
        _, states = replayed(past.at(slice(1, 1 + count)), slot, exactly(state[slot]))
        wanted, after = replayed(given, slot, states[-1])
        assert_rounded(outs[slot], wanted)
        assert_rounded(committed[slot], after[1])


@pytest.mark.parametrize(
    ("width", "dtype"),
    [pytest.param(n, d, marks=pytest.mark.slow) for n, d in zip((1, 63, 300), DTYPES, strict=True)],
)
def test_a_net_reads_a_prompt_as_float64_does(width: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(width)
    prompt = net_inputs(rng, dtype, 1, width, 2)
    state = mx.array(rng.normal(size=(1, HEADS * 2, 128, 128)), mx.float32)

    outs, committed = DeltaKernel("metal").read(prompt, mx.log(prompt.decay), state)

    wanted, states = replayed(prompt, 0, exactly(state[0]))
    assert_rounded(outs[0], wanted)
    assert_rounded(committed[0], states[-1])


def replayed(
    window: Inputs, slot: int, state: np.ndarray
) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """Outputs of one slot ``[W, H, Dv]``, and the state before and after each position."""
    queries, keys, values, decay, beta = (exactly(part)[slot] for part in window)
    group = values.shape[1] // keys.shape[1]
    outs, states = [], [state]
    for at in range(len(values)):
        key, query = (np.repeat(part[at], group, axis=0)[:, None] for part in (keys, queries))
        held = states[-1] * decay[at, :, None, None]
        change = beta[at, :, None] * (values[at] - (held * key).sum(axis=-1))
        states.append(held + change[..., None] * key)
        outs.append((states[-1] * query).sum(axis=-1))
    return np.array(outs), states


@dataclass(frozen=True)
class Projection:
    """An attention layer's one projection: heads, their size, and what is done to them."""

    queries: int
    keys: int
    size: int
    rotate: Any
    normed: bool = False
    gated: bool = False


PROJECTIONS = {
    "Qwen3.5 0.8B": Projection(8, 2, 256, nn.RoPE(64, base=1e7), normed=True, gated=True),
    "Qwen3.5 4B": Projection(16, 4, 256, nn.RoPE(64, base=1e7), normed=True, gated=True),
    "Qwen3.5 27B": Projection(24, 4, 256, nn.RoPE(64, base=1e7), normed=True, gated=True),
    "Qwen3.5 35B-A3B": Projection(16, 2, 256, nn.RoPE(64, base=1e7), normed=True, gated=True),
    "Llama 8B": Projection(32, 8, 128, Llama3RoPE(128, scaling_config={"factor": 8.0})),
    "Qwen3 0.6B": Projection(16, 8, 128, nn.RoPE(128, base=1e6), normed=True),
    "Gemma 3": Projection(4, 1, 256, nn.RoPE(256, base=1e6, scale=0.125), normed=True),
    "gpt-oss": Projection(64, 8, 64, YarnRoPE(64, base=150_000, scaling_factor=32.0)),
    "GLM 4": Projection(32, 2, 128, nn.RoPE(64, traditional=True)),
    "Phi 3": Projection(32, 32, 96, SuScaledRoPE(96, long_factor=2.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_heads_are_normed_rotated_and_written_as_operations_do(name: str, dtype: mx.Dtype) -> None:
    check_heads(PROJECTIONS[name], 1 + len(name) % len(WIDTHS), dtype)


def check_heads(of: Projection, width: int, dtype: mx.Dtype) -> None:
    """Write tails at their beginning, their end and between."""
    rng, norms = np.random.default_rng(0), {}
    if of.normed:
        weights = [noise(rng, dtype, of.size) for _ in "qk"]
        norms = {"query_norm": weights[0], "key_norm": weights[1], "epsilon": 1e-6}
    heads = Heads(of.queries, of.keys, of.size, rope_of(of.rotate), gated=of.gated, **norms)
    lengths = mx.array([0, 1, 2500], mx.int32)
    cursors = lengths + mx.array([0, TAIL - width, 40], mx.int32)
    window = Window.at(cursors, lengths, width, own_pages(3, 64))
    tails = tuple(noise(rng, dtype, 3, of.keys, TAIL, of.size) for _ in "kv")
    total = of.queries * heads.stride + 2 * of.keys * of.size
    projected = noise(rng, dtype, 3, width, total)

    (queries, written), (wanted, tails_wanted) = (
        form.prepare(projected, heads, tails, window)
        for form in (AttentionKernel("metal"), PlainAttention())
    )

    tolerance = 8 * DTYPES[dtype] + 2e-3
    assert_close(queries, wanted, tolerance)
    assert_close(written[0], tails_wanted[0], tolerance)
    assert_close(written[1], tails_wanted[1], 0.0)


def assert_close(got: mx.array, wanted: mx.array, tolerance: float) -> None:
    off = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32))
    allowed = tolerance * (1 + mx.abs(wanted.astype(mx.float32)))
    assert mx.all(off <= allowed).item(), f"off by {off.max().item()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("t < 0 || t >= width", "t < 0 || t > width", "off by|reads outside"),
        ("if (row >= asked + H * tail) return;", "", "race: writes new_keys"),
        ("offset > 0", "offset > 1", "off by"),
        ("e % 2 == 0", "e % 2 == 1", "reads outside of projected: element -1"),
        ("places[3 * n + 2] + t", "places[3 * n + 2]", "off by"),
    ],
)
def test_a_fault_planted_in_the_heads_is_seen(
    right: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, attention_kernel, right, wrong)
    rope = nn.RoPE(16, traditional=True)
    with pytest.raises((AssertionError, Fault), match=told):
        check_heads(Projection(5, 1, 32, rope, normed=True), 3, mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "width", "depth"), [(1, 1, 4), (1, 9, 0), (2, 4, 3), (3, 2, 2)])
def test_a_net_convolves_norms_and_gates_as_operations_do(
    group: int, width: int, depth: int, dtype: mx.Dtype
) -> None:
    check_convolution(16, group, width, depth, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("if (row >= units) return;", "", "reads outside of filters"),
        ("if (t == commit)", "if (true)", "race: writes conv_out"),
        ("CommitFirst ? 0 : width - 1", "width", "never writes conv_out"),
        ("(p) < Taps", "(p) <= Taps", "off by|reads outside"),
        ("if (row >= H) return;", "", "race: writes mixed"),
    ],
)
def test_a_fault_planted_in_the_convolution_is_seen(
    right: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, net_kernels, right, wrong)
    with pytest.raises((AssertionError, Fault), match=told):
        check_convolution(2, 3, 3, 2, mx.float32)


def check_convolution(key_heads: int, group: int, width: int, depth: int, dtype: mx.Dtype) -> None:
    """Make a net's inputs, after a window of which all drafts were accepted in one of two slots."""
    rng, slots = np.random.default_rng(width), 2
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * group}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    net = GatedDeltaNet(TextModelArgs(hidden_size=64, **sizes))
    net.set_dtype(dtype)
    total = net.conv_dim + net.value_dim + 2 * net.num_v_heads
    projected = (noise(rng, dtype, slots, width, total),)
    conv = noise(rng, dtype, slots, net.conv_kernel_size - 1, net.conv_dim)
    past = noise(rng, dtype, slots, 1 + depth, total) if depth else None
    kernels, operations = NetKernels(net, "metal"), NetOperations(net)

    (got, after), (wanted, after_wanted) = (
        form.prepare(projected, conv, past, mx.array([0, depth], mx.int32))
        for form in (kernels, operations)
    )

    tolerance = 4 * DTYPES[dtype] + 1e-5
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, tolerance)
    assert_close(after, after_wanted, 0.0)
    gated, gated_wanted = (form.gated(got.values, projected) for form in (kernels, operations))
    assert_close(gated, gated_wanted, tolerance)
