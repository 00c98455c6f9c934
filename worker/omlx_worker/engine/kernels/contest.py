"""A kernel proves itself, then competes.

Every part of a layer has a plain form, made of MLX's operations, and may have kernels. When a part
meets a size for the first time, on this device, all run on the same random input. A kernel that
fails, or that differs by more than rounding explains, is not used, and a warning says so. The other
forms are timed, and the fastest runs from then on.

What was measured is kept in a file, so that a model has the same forms after a restart: two forms
round differently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from omlx_worker.engine.kernels.delta_rule import Inputs, Kept
from omlx_worker.engine.kernels.window import Window

log = logging.getLogger(__name__)

TOLERANCES = {mx.float32: 2e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
"""The largest difference of two forms, as a share of the largest number, by the type of the least
exact of their results: the others are made of numbers as rough."""

CHAIN = 10
"""Runs of a form in one measurement, each after the one before it."""

LAPS = 3

Form = Callable[..., Any]
"""From arrays to arrays."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a part uses at one size.

    Attributes:
        size: for people.
        shapes: of all arguments.
        form: ``plain`` or the name of a kernel.
        microseconds: of one run of every form that can be used.
        faults: why other kernels cannot.
    """

    part: str
    size: str
    shapes: str
    form: str
    microseconds: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        times = [f"{name} {time:.0f} us" for name, time in self.microseconds.items()]
        told = ", ".join([*times, *dict.fromkeys(self.faults.values())])
        return f"{self.part}, {self.size}: {self.form}; {told}"


class Contest:
    """Decides which form of a part runs, once for each size. Used by one thread.

    Args:
        folder: keeps the results of this device and this software; None to measure at each start.
        fixed: a kernel that is right is used whatever the times say, and forms are those whose
            sums for a row depend on that row alone. Keeps nothing.

    Attributes:
        fixed: likewise.
    """

    def __init__(self, folder: Path | None = None, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self._results: dict[tuple[str, str, str], Result] = {}
        self._file = folder / f"kernels-{_identity()}.json" if folder and not fixed else None
        if self._file and self._file.exists():
            try:
                kept = [Result(**fields) for fields in json.loads(self._file.read_text())]
            except (ValueError, TypeError) as error:
                log.warning("%s is not used, its kernels are timed anew: %s", self._file, error)
                kept = []
            self._results = {(kind.part, kind.size, kind.shapes): kind for kind in kept}

    @property
    def results(self) -> ValuesView[Result]:
        """Every part and size so far, in the order in which they were met. It grows."""
        return self._results.values()

    def run(
        self,
        part: str,
        size: str,
        plain: Form,
        kernels: Mapping[str, Form],
        *arguments: Any,
        like: Sequence[Any] | None = None,
    ) -> Any:
        """Run the fastest kernel if it is faster than the plain form, else that.

        Args:
            kernels: by names.
            arguments: of the form.
            like: arguments in whose shapes the forms are compared, integers as they are; None for
                the arguments.
        """
        key = part, size, _shapes(like or arguments)
        result = self._results.get(key)
        if result is None:
            result = _decided(key, plain, kernels, sampled(like or arguments), fixed=self.fixed)
            self._results[key] = result
            mx.clear_cache()  # the memory of rows was counted without it
            self._keep()
        return kernels.get(result.form, plain)(*arguments)

    def _keep(self) -> None:
        if self._file is None:
            return
        text = json.dumps([asdict(result) for result in self.results], indent=1)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(".new")
            written.write_text(text)
            written.replace(self._file)
        except OSError as error:
            log.warning("cannot keep which kernels are faster (%s): they are timed anew", error)
            self._file = None


def _decided(
    key: tuple[str, str, str],
    plain: Form,
    kernels: Mapping[str, Form],
    arguments: Sequence[Any],
    *,
    fixed: bool,
) -> Result:
    mx.eval(arguments)
    wanted = plain(*arguments)
    mx.eval(wanted)
    faults = {name: _fault(form, arguments, wanted) for name, form in kernels.items()}
    faults = {name: fault for name, fault in faults.items() if fault}
    for fault in faults.values():
        _tell(key[0], fault)
    forms = {"plain": plain, **kernels}
    times = {
        name: _microseconds(form, arguments) for name, form in forms.items() if name not in faults
    }
    best = min(times, key=times.__getitem__)
    if fixed:
        best = next((name for name in kernels if name in times), "plain")
    return Result(*key, best, times, faults)


HERE = Contest()
"""This process's own, which keeps nothing."""


@cache
def _tell(part: str, fault: str) -> None:
    """Warn of a kernel, once a process for each reason."""
    log.warning("the kernel of %s is not used, plain operations are slower: %s", part, fault)


def _fault(form: Form, arguments: Sequence[Any], wanted: Any) -> str:
    """Why a form cannot be used; empty if it can."""
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


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max())


def _microseconds(form: Form, arguments: Sequence[Any]) -> float:
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


def _after(before: Sequence[mx.array], argument: Any) -> Any:
    """The same argument, computed after these arrays."""
    if isinstance(argument, mx.array):
        return mx.depends([argument], list(before))[0]
    first, *rest = argument
    parts = [_after(before, first), *rest]
    return type(argument)(*parts) if hasattr(argument, "_fields") else type(argument)(parts)


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _identity() -> str:
    """A hash of what decides how fast a form is and how it rounds: the device and the software."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    parts = [
        *(mx.device_info().get(name) for name in ("device_name", "architecture")),
        *(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm")),
        *(platform.version(), platform.machine()),
        *(path.read_text() for path in sources),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def sampled(value: Any, seed: int = 0) -> Any:
    """The same shapes with random numbers of an activation's size, on which any form is stable.

    Integers stay as they are.
    """
    if isinstance(value, Window):
        return value.filled()
    if isinstance(value, Inputs | Kept):
        parts = {name: sampled(part, seed + n) for n, (name, part) in _named(value)}
        gates = {name: mx.sigmoid(parts[name]) for name in ("decay", "beta")}
        keys = parts["keys"] / mx.linalg.norm(parts["keys"], axis=-1, keepdims=True)
        return value._replace(**parts | gates | {"keys": keys})
    if isinstance(value, mx.array):
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        key = mx.random.key(seed)
        return mx.random.normal(value.shape, value.dtype, scale=0.5, key=key)
    if isinstance(value, dict):
        return {name: sampled(part, seed + n) for n, (name, part) in enumerate(value.items())}
    if isinstance(value, tuple | list):
        return type(value)(sampled(part, seed + 10 * n) for n, part in enumerate(value))
    return value


def _shapes(value: Any) -> str:
    """Shapes and types of the arrays, and numbers as they are."""
    if isinstance(value, mx.array):
        return f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    if isinstance(value, Window):
        return f"{value.spans}"
    if isinstance(value, dict):
        return _shapes(tuple(value.values()))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shapes, value))})"
    return f"{value}"


def _named(value: Inputs | Kept) -> Iterator[tuple[int, tuple[str, mx.array]]]:
    return enumerate(value._asdict().items())
