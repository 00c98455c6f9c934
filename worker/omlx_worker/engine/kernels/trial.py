"""Whether a form gives what another one gives, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from omlx_worker.engine.kernels.sample import sampled

TOLERANCES = {mx.float32: 2e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
"""The largest difference of two results, as a share of the largest number, by their type."""

CHAIN = 10
"""Runs of a form in one measurement, each after the one before it."""

LAPS = 3

CACHED = 1 << 27
"""Bytes that a GPU's caches hold, at most. A step reads each layer's weights and states once, from
memory; a form that reads them twice must pay for it in a measurement too."""

Form = Callable[..., Any]
"""From arrays to arrays."""


def fault_of(form: Form, arguments: Sequence[Any], wanted: Any, *, exact: bool) -> str:
    """Why a form cannot be used; empty if it can.

    Args:
        wanted: what the plain form makes of the arguments.
        exact: whether each result is as exact as its type; else all are as rough as the roughest.
    """
    try:
        made = form(*arguments)
        mx.eval(made)
    except (RuntimeError, ValueError) as error:
        return f"it fails: {str(error).splitlines()[0]}"
    roughest = max(TOLERANCES[array.dtype] for array in _arrays(wanted))
    for mine, other in zip(_arrays(made), _arrays(wanted), strict=True):
        apart = _largest(mine.astype(mx.float32) - other.astype(mx.float32))
        largest = _largest(other)
        least = TOLERANCES[other.dtype] if exact else roughest
        # Not `>`: a NaN is a fault.
        if not apart <= least * largest:
            return f"it is {apart:.3g} off, of {largest:.3g}"
    return ""


def cold(arguments: Sequence[Any]) -> list[Sequence[Any]]:
    """Arguments for a measurement in which no run finds what it reads in a cache.

    Returns:
        As many samples like these, they among them, as a cache cannot hold, or as there are runs.
    """
    size = sum(array.nbytes for array in _arrays(arguments))
    count = min(CHAIN, -(-CACHED // max(1, size)))
    others = [sampled(arguments, 100 * n) for n in range(1, count)]
    mx.eval(others)
    return [arguments, *others]


def microseconds(form: Form, samples: Sequence[Sequence[Any]]) -> float:
    """One run among several that wait for each other. Only their evaluation is timed.

    Args:
        samples: arguments of the runs, in turn.
    """
    best = float("inf")
    for _ in range(LAPS):
        out = form(*samples[0])
        for run in range(1, CHAIN):
            first, *rest = samples[run % len(samples)]
            out = form(_after(_arrays(out), first), *rest)
        _empty_caches()
        start = time.perf_counter()
        mx.eval(out)
        mx.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / CHAIN * 1e6


def _empty_caches() -> None:
    """Let the device's caches hold nothing of any sample."""
    mx.eval(mx.full(CACHED, 1, mx.uint8))
    mx.synchronize()


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max())


def _after(before: Sequence[mx.array], argument: Any) -> Any:
    """The same argument, computed after these arrays."""
    if isinstance(argument, mx.array):
        return mx.depends([argument], list(before))[0]
    first, *rest = argument
    parts = [_after(before, first), *rest]
    return type(argument)(*parts) if hasattr(argument, "_fields") else type(argument)(parts)


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
