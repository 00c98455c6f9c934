"""Whether a form gives what another one gives, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

TOLERANCES = {mx.float32: 2e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
"""The largest difference of two forms, as a share of the largest number, by the type of the least
exact of their results: the others are made of numbers as rough."""

CHAIN = 10
"""Runs of a form in one measurement, each after the one before it."""

LAPS = 3

Form = Callable[..., Any]
"""From arrays to arrays."""


def fault_of(form: Form, arguments: Sequence[Any], wanted: Any) -> str:
    """Why a form cannot be used; empty if it can.

    Args:
        wanted: what the plain form makes of the arguments.
    """
    try:
        made = form(*arguments)
        mx.eval(made)
    except (RuntimeError, ValueError) as error:
        return f"it fails: {str(error).splitlines()[0]}"
    least = max(TOLERANCES[array.dtype] for array in _arrays(wanted))
    for mine, other in zip(_arrays(made), _arrays(wanted), strict=True):
        apart = _largest(mine.astype(mx.float32) - other.astype(mx.float32))
        largest = _largest(other)
        # Not `>`: a NaN is a fault.
        if not apart <= least * largest:
            return f"it is {apart:.3g} off, of {largest:.3g}"
    return ""


def microseconds(form: Form, arguments: Sequence[Any]) -> float:
    """One run among several that wait for each other. Only their evaluation is timed."""
    best = float("inf")
    for _ in range(LAPS):
        out = form(*arguments)
        for _ in range(CHAIN - 1):
            out = form(_after(_arrays(out), arguments[0]), *arguments[1:])
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(out)
        mx.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / CHAIN * 1e6


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
