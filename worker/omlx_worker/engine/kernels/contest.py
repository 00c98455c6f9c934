"""A kernel proves itself, then competes.

Every part of a layer has a plain form, made of MLX's operations, and may have kernels. They are
compared on random input of a size, on this device: a kernel that fails, or that differs by more
than rounding explains, is not used, and a warning says so. The other forms are timed, and the
fastest runs from then on.

That takes milliseconds and memory, so no size is timed while rows wait. What is traced while a
model is loaded or its worker is idle is decided on the spot. A size that rows meet first borrows
the form of the next larger size of its kind, or else of the largest, and is decided when the worker
is idle. A kind is one program, with the same constants; numbers say how many blocks of it run and
how often its loops do. So a proof at one size, on this device, stands for its kind; what depends on
numbers is proven by the tests, in an emulator. Of a kind without a proof the plain form runs.

What was measured is kept in a file, so that a model has the same forms after a restart: two forms
round differently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.sample import sampled
from omlx_worker.engine.kernels.trial import Form, cold, fault_of, microseconds

log = logging.getLogger(__name__)

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class CallSize:
    """The size of a call.

    Attributes:
        numbers: of rows, positions and the like. A form takes any of them.
        kind: all else that decides which program a kernel is: heads, types, options.
    """

    numbers: dict[str, int]
    kind: str

    def __str__(self) -> str:
        return ", ".join([*(f"{count} {name}" for name, count in self.numbers.items()), self.kind])

    def __hash__(self) -> int:
        return hash((self.kind, *self.numbers.values()))


@dataclass(frozen=True, slots=True)
class Result:
    """What a part uses at one size.

    Attributes:
        form: ``plain`` or the name of a kernel.
        microseconds: of one run of every form that can be used; empty if none was timed.
        faults: why other kernels cannot.
    """

    part: str
    size: CallSize
    form: str
    microseconds: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        times = [f"{name} {time:.0f} us" for name, time in self.microseconds.items()]
        told = ", ".join([*times, *dict.fromkeys(self.faults.values())])
        return f"{self.part}, {self.size}: {self.form}" + (f"; {told}" if told else "")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A size that is still to be decided, and the form that it borrows."""

    form: str
    decide: Callable[[], Result]


class Contest:
    """Decides which form of a part runs, once for each size. Used by one thread.

    Args:
        folder: keeps the results of this device and this software; None to measure at each start.
        fixed: a kernel that is right is used whatever the times say, so none is timed, and forms
            are those whose sums for a row depend on that row alone. Keeps nothing. Every size is
            proven where it is met, since which form runs must not depend on when that is.

    Attributes:
        fixed: likewise.
        eager: whether a size is decided where it is first met. The worker turns it off while
            rows may wait.
        contests: how often forms were compared so far.
    """

    def __init__(self, folder: Path | None = None, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.eager = True
        self.contests = 0
        self._results: dict[tuple[str, CallSize], Result] = {}
        self._waiting: dict[tuple[str, CallSize], _Waiting] = {}
        self._outdated = False
        self._file = folder / f"kernels-{_identity()}.json" if folder and not fixed else None
        if self._file and self._file.exists():
            try:
                kept = [_parsed(fields) for fields in json.loads(self._file.read_text())]
            except (ValueError, TypeError, KeyError) as error:
                log.warning("%s is not used, its kernels are timed anew: %s", self._file, error)
                kept = []
            self._results = {(result.part, result.size): result for result in kept}

    @property
    def results(self) -> list[Result]:
        """Every part and size that is decided, in the order in which they were."""
        return list(self._results.values())

    @property
    def waiting(self) -> list[str]:
        """The parts and sizes that rows met and that are still to be decided, for people."""
        return [f"{part}, {size}" for part, size in self._waiting]

    def run(
        self,
        part: str,
        size: CallSize,
        forms: Mapping[str, Form],
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        *,
        like: Callable[[], Sequence[Any]] | None = None,
        exact: bool = False,
    ) -> Any:
        """Run the form of a size.

        Args:
            forms: by names; the plain one is among them.
            arguments, options: of the form.
            like: makes arguments in whose shapes the forms are compared, integers as they are;
                None for the arguments.
            exact: see `fault_of`.
        """
        key = part, size
        decided = self._results.get(key) or self._waiting.get(key)
        if decided is None or (self.eager and key in self._waiting):
            decide = self._trial(key, forms, like() if like else arguments, options or {}, exact)
            if self.eager or self.fixed:
                decided = decide()
            else:
                decided = self._waiting[key] = _Waiting(self._nearest(*key), decide)
        return forms.get(decided.form, forms[PLAIN])(*arguments, **options or {})

    def decide_next(self) -> bool:
        """Decide one of the sizes that rows met: some 20 ms, for a worker that is idle.

        Returns:
            Whether none is left, and some of them run another form than the one they borrowed. What
            was traced with that keeps it until it is traced again.
        """
        if self._waiting:
            waiting = next(iter(self._waiting.values()))
            self._outdated |= waiting.decide().form != waiting.form
        if self._waiting or not self._outdated:
            return False
        self._outdated = False
        return True

    def _nearest(self, part: str, size: CallSize) -> str:
        """The form of the next larger size of this kind, or of the largest."""
        kind = [
            result
            for result in self.results
            if result.part == part
            and result.size.kind == size.kind
            and result.size.numbers.keys() == size.numbers.keys()
        ]
        kind.sort(key=lambda result: math.prod(result.size.numbers.values()))
        larger = (
            result
            for result in kind
            if all(result.size.numbers[name] >= count for name, count in size.numbers.items())
        )
        found = next(larger, kind[-1] if kind else None)
        return found.form if found else PLAIN

    def _trial(
        self,
        key: tuple[str, CallSize],
        forms: Mapping[str, Form],
        like: Sequence[Any],
        options: Mapping[str, Any],
        exact: bool,
    ) -> Callable[[], Result]:
        """What decides a size, whenever it is called. It holds no array of rows."""
        arguments, given = sampled([*like]), sampled({**options})

        def decide() -> Result:
            self._waiting.pop(key, None)
            self.contests += 1
            mx.eval(arguments, given)
            bound = {name: partial(form, **given) for name, form in forms.items()}
            result = _decided(key, bound, arguments, exact=exact, timed=not self.fixed)
            self._results[key] = result
            mx.clear_cache()  # the memory of rows was counted without it
            self._keep()
            return result

        return decide

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


HERE = Contest()
"""This process's own, which keeps nothing."""


def _decided(
    key: tuple[str, CallSize],
    forms: Mapping[str, Form],
    arguments: Sequence[Any],
    *,
    exact: bool,
    timed: bool,
) -> Result:
    wanted = forms[PLAIN](*arguments)
    mx.eval(wanted)
    kernels = [name for name in forms if name != PLAIN]
    faults = {name: fault_of(forms[name], arguments, wanted, exact=exact) for name in kernels}
    faults = {name: fault for name, fault in faults.items() if fault}
    for fault in faults.values():
        _tell(key[0], fault)
    right = [name for name in forms if name not in faults]
    if not timed:
        best = next((name for name in kernels if name in right), PLAIN)
        return Result(*key, best, {}, faults)
    samples = cold(arguments)
    times = {name: microseconds(forms[name], samples) for name in right}
    return Result(*key, min(times, key=times.__getitem__), times, faults)


@cache
def _tell(part: str, fault: str) -> None:
    """Warn of a kernel, once a process for each reason."""
    log.warning("the kernel of %s is not used, plain operations are slower: %s", part, fault)


def _parsed(fields: dict[str, Any]) -> Result:
    return Result(**fields | {"size": CallSize(**fields["size"])})


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
