"""A kernel proves itself, then competes.

Every part of a layer has a plain form, made of MLX's operations, and may have kernels. They are
compared on random input of a size, on this device: a kernel that fails, or that differs by more
than rounding explains, is not used, and a warning says so. The other forms are timed, and the
fastest runs from then on.

A size is decided where it is first met, once for a device and its software. That takes some 20 ms,
less than the trace that meets it. What depends on numbers alone is proven by the tests, in an
emulator.

What was measured is kept in a file, so that a model has the same forms after a restart: two forms
round differently.
"""

from __future__ import annotations

import hashlib
import json
import logging
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
class Result:
    """What a part uses at one size.

    Attributes:
        size: all that decides which program runs and how long: numbers, heads, types, options.
        form: ``plain`` or the name of a kernel.
        microseconds: of one run of every form that can be used; empty if none was timed.
        faults: why other kernels cannot.
    """

    part: str
    size: str
    form: str
    microseconds: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        times = [f"{name} {time:.0f} us" for name, time in self.microseconds.items()]
        told = ", ".join([*times, *dict.fromkeys(self.faults.values())])
        return f"{self.part}, {self.size}: {self.form}" + (f"; {told}" if told else "")


class Contest:
    """Decides which form of a part runs, once for each size. Used by one thread.

    Args:
        folder: keeps the results of this device and this software; None to measure at each start.
        fixed: a kernel that is right is used whatever the times say, so none is timed, and forms
            are those whose sums for a row depend on that row alone. Keeps nothing.

    Attributes:
        fixed: likewise.
        contests: how often forms were compared so far.
    """

    def __init__(self, folder: Path | None = None, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.contests = 0
        self._results: dict[tuple[str, str], Result] = {}
        self._file = folder / f"kernels-{_identity()}.json" if folder and not fixed else None
        if self._file:
            try:
                kept = [Result(**fields) for fields in json.loads(self._file.read_text())]
            except FileNotFoundError:
                kept = []
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("%s is not used, its kernels are timed anew: %s", self._file, error)
                kept = []
            self._results = {(result.part, result.size): result for result in kept}

    @property
    def results(self) -> list[Result]:
        """Every part and size that is decided, in the order in which they were."""
        return list(self._results.values())

    def run(
        self,
        part: str,
        size: str,
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
        if key not in self._results:
            self.contests += 1
            sample = sampled([*(like() if like else arguments)])
            given = sampled({**(options or {})})
            mx.eval(sample, given)
            bound = {name: partial(form, **given) for name, form in forms.items()}
            self._results[key] = _decided(key, bound, sample, exact=exact, timed=not self.fixed)
            del sample, given
            mx.clear_cache()  # the memory of rows was counted without it
            self._keep()
        return forms.get(self._results[key].form, forms[PLAIN])(*arguments, **options or {})

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
    key: tuple[str, str],
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
