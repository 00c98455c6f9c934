"""Where the processor's time goes: a table by file, printed with pytest's ``--durations``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuSeconds:
    """A plugin of pytest, in the process that prints and in those that run tests."""

    def __init__(self) -> None:
        self._since = cpu_seconds()
        self._files: Counter[str] = Counter()

    def _passed(self) -> float:
        since, self._since = self._since, cpu_seconds()
        return self._since - since

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        self._since = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        report.user_properties = [*report.user_properties, ("cpu_seconds", self._passed())]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        passed = dict(report.user_properties).get("cpu_seconds", 0.0)
        self._files[report.location[0]] += passed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds by file")
        for path, seconds in self._files.most_common(40):
            terminalreporter.write_line(f"{seconds:7.1f}  {path}")
        terminalreporter.write_line(f"{self._files.total():7.1f}  all")
