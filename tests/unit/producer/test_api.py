"""The package's face: what it exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import omlx_producer
from omlx_producer import errors, wire


def run_fresh(code: str) -> tuple[int, str]:
    """Run code in a new interpreter: its exit code and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def require_absent(imports: str, packages: set[str]) -> str:
    """Code that imports something, and fails with those of the packages that this loads."""
    return (
        f"import sys, {imports}\n"
        f"loaded = {packages} & {{name.partition('.')[0] for name in sys.modules}}\n"
        "sys.exit(' '.join(loaded) or None)"
    )


def test_the_exported_names_are_sorted_and_resolve() -> None:
    exported = omlx_producer.__all__
    assert exported == sorted(exported)
    assert set(exported) <= set(dir(omlx_producer))
    assert all(hasattr(omlx_producer, name) for name in exported)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'omlx_producer' has no attribute 'Produser'"):
        _ = omlx_producer.Produser  # type: ignore[attr-defined]


def test_importing_the_package_loads_none_of_its_dependencies() -> None:
    code = require_absent("omlx_producer", {"redis", "rq", "pydantic", "pydantic_settings", "rich"})
    assert run_fresh(code) == (0, "")


def test_a_name_loads_no_more_than_its_module_needs() -> None:
    code = "from omlx_producer import InvalidRequest\n" + require_absent("os", {"redis", "rq"})
    assert run_fresh(code) == (0, "")


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
    assert all(hasattr(wire, name) for name in wire.__all__)
    assert issubclass(wire.InvalidRequest, ValueError)


@pytest.mark.parametrize("module", ["omlx_producer", "omlx_producer.cli.main"])
def test_a_producer_never_imports_mlx_or_the_worker(module: str) -> None:
    heavy = {"mlx", "mlx_lm", "omlx_worker", "transformers", "numpy"}
    assert run_fresh(require_absent(module, heavy)) == (0, "")
