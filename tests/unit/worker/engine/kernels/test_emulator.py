"""The emulator tells each fault that a GPU would hide, and refuses what Metal does not compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx
import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from omlx_worker.engine.kernels.source import source
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import Fault, needs_compiler
from tests.helpers.metal.language import Refused

pytestmark = needs_compiler

MATRICES_OF_MLX = "mlx/backend/metal/kernels/gated_delta_update.h"

THREAD = "const uint i = thread_index_in_threadgroup;"


def run(
    body: str,
    x: Sequence[float] = range(64),
    size: int = 64,
    *,
    threads: int = 64,
    groups: int = 1,
    header: str = "",
    dtype: mx.Dtype = mx.float32,
    **template: Any,
) -> list[float]:
    """What a kernel of an input ``x`` and an output ``out`` writes."""
    [out] = emulator.launch(
        "metal",
        "planted",
        f"{THREAD}\n{body}",
        {"x": mx.array(list(x), dtype)},
        {"out": ((size,), dtype)},
        template,
        grid=(threads * groups, 1, 1),
        threadgroup=(threads, 1, 1),
        header=header,
    )
    return out.tolist()


def cases(table: Mapping[str, tuple[str, str]]) -> list[Any]:
    """A table's cases; compiling each takes its time, so most are slow."""
    return [
        pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, case in table.items()
    ]


QUICK = {
    *("a missing barrier", "a race of a read and a write", "a divergent barrier"),
    *("a lane that left before a shuffle", "a read past the end", "an output never written"),
    *("a double", "a bare pointer", "a pointer of another space", "expf"),
}

FAULTS = {
    "a missing barrier": (
        "threadgroup float s[64]; s[i] = x[i]; out[i] = s[63 - i];",
        r"reads s\[63\] before it is written",
    ),
    "a race of a read and a write": (
        """threadgroup float s[64]; s[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float other = s[(i + 1) % 64]; s[i] = other; out[i] = other;""",
        r"race: writes s\[1\], which another thread read",
    ),
    "a race of two writes": (
        "threadgroup float s[64]; s[i / 2] = x[i]; out[i] = 0;",
        r"race: writes s\[0\], which thread 0 wrote",
    ),
    "a barrier of a simdgroup where a group's is needed": (
        """threadgroup float s[64]; s[i] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = s[63 - i];""",
        r"reads s\[63\] before it is written",
    ),
    "a barrier that orders no device memory": (
        """out[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = out[63 - i];""",
        r"race: reads out\[63\], which thread 63 wrote",
    ),
    "a divergent barrier": (
        "if (i < 63) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = 0;",
        r"divergent barrier: line \d+ is not reached by thread 63",
    ),
    "an early return before a barrier": (
        "out[i] = 0; if (i == 5) return; threadgroup_barrier(mem_flags::mem_none);",
        r"divergent barrier: line \d+ is not reached by thread 5",
    ),
    "a lane that left before a shuffle": (
        "out[i] = 0; if (i == 5) return; out[i] = simd_shuffle_xor(x[i], 1);",
        r"reads lane 5 of its simdgroup, which does not take part",
    ),
    "a lane that left before a product of matrices": (
        """simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); out[i] = 0;
        if (i == 5) return; simdgroup_multiply(m, m, m); out[i] = m.thread_elements()[0];""",
        r"reads lane 5 of its simdgroup, which does not take part",
    ),
    "a matrix that is loaded past the end": (
        """simdgroup_float8x8 m; simdgroup_load(m, x, 9); out[i] = m.thread_elements()[0];""",
        r"reads outside of x: element 6\d of 64",
    ),
    "a matrix that is stored to by two simdgroups": (
        """simdgroup_float8x8 m; simdgroup_load(m, x); simdgroup_store(m, out); out[i] = 0;""",
        r"race: writes out\[\d+\]",
    ),
    "a read past the end": ("out[i] = x[i + 1];", r"reads outside of x: element 64 of 64"),
    "a read before the beginning": ("out[i] = x[int(i) - 1];", r"reads outside of x: element -1"),
    "a write past the end": ("out[i + 1] = x[i];", r"writes outside of out: element 64 of 64"),
    "an output read before it is written": (
        "out[i] = out[i] + x[i];",
        r"reads out\[0\] before it is written",
    ),
    "an output never written": (
        "if (i != 63) out[i] = x[i];",
        r"never writes out\[63\] of 64",
    ),
    "four numbers that are not aligned": (
        "struct alignas(16) Four { float at[4]; }; out[i] = 0;"
        "out[i] = (*reinterpret_cast<const device Four*>(x + 1)).at[0];",
        r"reads 16 bytes at byte 4 of x, not aligned",
    ),
    "an index past a local array": (
        "float local[4] = {}; for (int n = 0; n <= int(i); ++n) local[n] = 0; out[i] = local[0];",
        r"index 4 of a local array",
    ),
    "an index past an array of a group": (
        "threadgroup float s[2][32]; s[0][i] = x[i]; out[i] = x[i];",
        r"index 32 of 32 in threadgroup memory",
    ),
    "an infinite number in fast mathematics": (
        "out[i] = fast::exp(i == 3 ? -INFINITY : x[i]);",
        r"a fast exponential of -inf",
    ),
    "a division by zero": ("out[i] = 7 / int(x[i]);", r"divides by zero"),
    "too much threadgroup memory": (
        "threadgroup float s[64][129]; s[i][0] = x[i]; out[i] = 0;",
        r"needs 33024 bytes of threadgroup memory, of 32768",
    ),
}


@pytest.mark.parametrize(("body", "told"), cases(FAULTS))
def test_a_planted_fault_is_told(body: str, told: str) -> None:
    with pytest.raises(Fault, match=told):
        run(body)


def test_groups_that_write_the_same_number_are_told() -> None:
    with pytest.raises(Fault, match=r"writes out\[0\], which thread 0 of another group wrote"):
        run("out[i] = x[i];", groups=2)


REFUSED = {
    "a double": ("double a = x[i]; out[i] = a;", "'double'"),
    "a bare pointer": (
        "float y[2]; float* p = y; out[i] = 0;",
        "'float[*]' has no address space",
    ),
    "a pointer into a buffer without its space": (
        "const float* p = x; out[i] = p[0];",
        "'float[*]' has no address space",
    ),
    "a pointer of another space": ("const constant float* p = x; out[i] = p[0];", "Constant"),
    "a static local": ("static int n = 0; out[i] = n;", "no static locals"),
    "expf": ("out[i] = expf(x[i]);", "'expf' was not declared"),
    "__expf": ("out[i] = __expf(x[i]);", "'__expf'"),
    "fmaxf": ("out[i] = fmaxf(x[i], 0.0f);", "'fmaxf' was not declared"),
    "rsqrtf": ("out[i] = rsqrtf(x[i]);", "'rsqrtf' was not declared"),
    "std": ("out[i] = std::max(x[i], 0.0f);", "'std'"),
    "CUDA's indices": ("out[i] = x[threadIdx.x];", "'threadIdx' was not declared"),
    "an array of a size that is not constant": ("float y[i]; out[i] = y[0];", "variable length"),
    "threadgroup memory in a block": (
        "if (i < 4) { threadgroup float s[4]; s[i] = 0; } out[i] = 0;",
        "'threadgroup'",
    ),
    "a bfloat of a float without a cast": ("bfloat b = x[i]; out[i] = b;", "bfloat"),
    "a matrix of another size": ("simdgroup_matrix<float, 4, 4> m; out[i] = 0;", "of 8 x 8"),
    "a matrix of another type than its memory": (
        "simdgroup_half8x8 m; simdgroup_load(m, x); out[i] = 0;",
        "from its own type",
    ),
    "an output that is an input": ("x[i] = 0.0f; out[i] = 0;", "lvalue required"),
}


@pytest.mark.parametrize(("body", "told"), cases(REFUSED))
def test_what_metal_does_not_compile_is_refused(body: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        run(body)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("int down(int n) { return n ? down(n - 1) : 0; }", "'down' calls itself"),
        ("float sum(float x[4]) { return x[0] + x[3]; }", "has no address space"),
        ("template <int N = 2> struct A {}; constexpr int two = 2;", "'constexpr int two' has no"),
    ],
)
def test_what_metal_forbids_in_a_header_is_refused(header: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        run("out[i] = 0;", header=f"{header}\n")


def test_a_header_may_have_constants_and_functions_of_every_address_space() -> None:
    header = """
    constant constexpr int offset = 1;
    constant float weights[2] = {1.0f, 2.0f};
    float first(const device float* p) { return p[offset] + weights[1]; }
    float last(thread float* p, threadgroup float* q) { return p[1] + q[63]; }
    """
    body = """
    threadgroup float s[64]; s[i] = x[i]; float own[2] = {0.0f, 0.5f};
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = first(x) + last(own, s) + simd_sum(1.0f) + simd_max(x[i]);
    """
    assert run(body, header=header) == [3 + 63.5 + 32 + 31] * 32 + [3 + 63.5 + 32 + 63] * 32


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_numbers_round_after_each_operation_as_mlx_does(dtype: mx.Dtype) -> None:
    x = mx.random.normal((1000,), key=mx.random.key(0)) * mx.exp(mx.linspace(-8, 5, 1000))
    a, b, c = x.astype(dtype), x[::-1].astype(dtype), (x * x).astype(dtype)

    [got] = emulator.launch(
        *("metal", "narrow"),
        """const uint i = thread_position_in_grid.x;
        out[i] = (a[i] * b[i] + c[i]) / 3 - exp(-abs(a[i]));""",
        {"a": a, "b": b, "c": c},
        {"out": (a.shape, dtype)},
        {},
        grid=(1000, 1, 1),
        threadgroup=(64, 1, 1),
    )

    wanted = (a * b + c) / 3 - mx.exp(-mx.abs(a))
    assert mx.array_equal(got, wanted)


def test_a_kernel_gets_shapes_strides_dimensions_scalars_and_template_arguments() -> None:
    body = """
    const uint i = thread_position_in_grid.x;
    out[i] = x_shape[1] + 10 * x_strides[0] + 100 * x_ndim + 1000 * one + 10000 * Count
        + (Yes ? 100000 : 0) + long(1000000) * few[1] + static_cast<T>(0.75f);
    """
    [out] = emulator.launch(
        *("metal", "told", body),
        {"x": mx.zeros((2, 7)), "one": mx.array(1), "few": mx.array([0, 1])},
        {"out": ((3,), mx.float32)},
        {"T": mx.int32, "Count": 1, "Yes": True},
        grid=(3, 1, 1),
        threadgroup=(2, 1, 1),
    )
    assert out.tolist() == [1111277.0] * 3


def test_a_group_at_the_edge_of_the_grid_has_fewer_threads() -> None:
    [out] = emulator.launch(
        *("metal", "edge"),
        """out[thread_position_in_grid.x] = 100 * threads_per_threadgroup.x
            + 10 * threadgroup_position_in_grid.x + thread_index_in_threadgroup;""",
        {"x": mx.zeros((9,))},
        {"out": ((7,), mx.int32)},
        {},
        grid=(7, 1, 1),
        threadgroup=(4, 1, 1),
    )
    assert out.tolist() == [400, 401, 402, 403, 310, 311, 312]


def test_lanes_that_take_different_ways_meet_again() -> None:
    body = """
    float sum = 0;
    if (i % 2) for (uint n = 0; n < i; ++n) sum += simd_sum(1.0f);
    out[i] = 1000 * simd_sum(1.0f) + sum;
    """
    assert run(body, size=4, threads=4) == [4000, 4002, 4000, 4000 + 2 + 1 + 1]


def test_a_barrier_of_a_simdgroup_orders_its_own_lanes() -> None:
    body = """
    threadgroup float s[64]; s[i] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float other = s[i ^ 31];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    s[i] = other;
    out[i] = s[i];
    """
    assert run(body) == [i ^ 31 for i in range(64)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrices_of_a_simdgroup_multiply_as_matrices_do(dtype: mx.Dtype) -> None:
    a, b = (mx.random.normal((8, 8), key=mx.random.key(n)).astype(dtype) for n in (0, 1))

    product, across, own = emulator.launch(
        *("metal", "matrices"),
        """simdgroup_matrix<T, 8, 8> left, right;
        simdgroup_float8x8 sum(2.0f);
        simdgroup_load(left, a);
        simdgroup_load(right, b, 8, ulong2{0, 0}, true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
        simdgroup_store(sum, product);
        simdgroup_store(sum, across, 8, ulong2{0, 0}, true);
        const int lane = thread_index_in_simdgroup;
        const int row = (lane / 4 & 4) + lane / 2 % 4;
        const int column = (lane / 4 & 2) * 2 + lane % 2 * 2;
        for (int i = 0; i < 2; ++i) own[8 * row + column + i] = left.thread_elements()[i];""",
        {"a": a, "b": b},
        {"product": ((8, 8), mx.float32), "across": ((8, 8), mx.float32), "own": ((8, 8), dtype)},
        {"T": dtype},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )

    wanted = a.astype(mx.float32) @ b.astype(mx.float32).T + 2 * mx.eye(8)
    assert mx.allclose(product, wanted, 1e-5, 1e-5).item()
    assert mx.array_equal(across, product.T).item()
    assert mx.array_equal(own, a).item()


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 21])
def test_a_kernel_of_mlx_that_multiplies_matrices_computes_what_mlx_does(length: int) -> None:
    (package,) = mlx.__path__
    text = (Path(package) / "include" / MATRICES_OF_MLX).read_text()
    macros, _, rest = text[text.index("#define AT(") :].partition("\ntemplate ")
    body = rest[rest.index(") {") + 3 : rest.index("\n}\n")]
    body = body.replace("ulong2(0, 0)", "ulong2{0, 0}")
    # MLX has no barrier there, since the lanes of a GPU run in step.
    body = body.replace(
        "g_ += C * Hv;", "g_ += C * Hv; simdgroup_barrier(mem_flags::mem_threadgroup);"
    )
    heads, size, steps = 2, 16, (1, length, 2)
    queries, keys, values = (
        mx.random.normal((*steps, size), key=mx.random.key(n)) / 4 for n in range(3)
    )
    decay, beta = (mx.random.uniform(0.5, 1, steps, key=mx.random.key(n)) for n in (3, 4))
    state = mx.random.normal((1, heads, size, size), key=mx.random.key(5))

    got = emulator.launch(
        *("metal", "of_mlx", body),
        {"q": queries, "k": keys, "v": values, "state_in": state, "g": decay, "beta": beta}
        | {"T": mx.array(length)},
        {"y": (values.shape, mx.float32), "state_out": (state.shape, mx.float32)},
        {"InT": mx.float32, "Dk": size, "Dv": size, "Hk": heads, "Hv": heads, "C": 8},
        grid=(32, size // 8, heads),
        threadgroup=(32, size // 8, 1),
        header=f"#define MLX_MTL_PRAGMA_UNROLL\n{macros}",
    )

    wanted = gated_delta_ops(queries, keys, values, decay, beta, state)
    for mine, other in zip(got, wanted, strict=True):
        assert mx.allclose(mine, other, 1e-5, 1e-5).item()


def test_logarithms_near_one_keep_their_digits_on_metal() -> None:
    x = mx.array([2.0**-30, 1e-6, 1e-3, 1.0, 50.0, 1e6, 1e12, 0.0])

    [got] = emulator.launch(
        *("metal", "log1p", source("metal", "out[lane] = LOG1P(x[lane]);")),
        {"x": x},
        {"out": (x.shape, mx.float32)},
        {},
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
    )

    assert mx.allclose(got, mx.log1p(x), 1e-6, 0.0).item()


def test_a_keyword_of_metal_is_no_name() -> None:
    with pytest.raises(Refused, match="'kernel'"):
        emulator.launch(
            "metal",
            "keyword",
            "out[0] = kernel[0];",
            {"kernel": mx.zeros((9,))},
            {"out": ((1,), mx.float32)},
            {},
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )


def test_more_threads_than_metal_has_in_a_group_are_refused() -> None:
    with pytest.raises(Refused, match="1025 threads"):
        run("out[i] = 0;", size=1025, threads=1025)
