"""The package's face: what it exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import omlx_producer
from omlx_producer import errors, protocol


def test_the_exported_names_are_sorted_and_complete() -> None:
    exported = omlx_producer.__all__
    assert exported == sorted(exported)
    public = {
        name
        for name, value in vars(omlx_producer).items()
        if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert set(exported) == public


def test_every_exception_is_exported_and_of_one_tree() -> None:
    exceptions = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    }
    assert exceptions.keys() <= set(omlx_producer.__all__)
    assert all(issubclass(value, errors.OmlxQueueError) for value in exceptions.values())
    assert all(name in (errors.__doc__ or "") for name in exceptions)


def test_the_protocol_exports_what_it_gathers() -> None:
    assert all(hasattr(protocol, name) for name in protocol.__all__)
    assert issubclass(protocol.InvalidRequest, ValueError)


@pytest.mark.parametrize("module", ["omlx_producer", "omlx_producer.cli.main"])
def test_a_producer_never_imports_mlx_or_the_worker(module: str) -> None:
    check = (
        f"import sys, {module}\n"
        "heavy = {'mlx', 'mlx_lm', 'omlx_worker', 'transformers', 'numpy'}\n"
        "sys.exit(' '.join(heavy & {name.partition('.')[0] for name in sys.modules}) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
