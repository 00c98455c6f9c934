"""The packages keep to their rooms: no circles, imports in one direction only."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from omlx_producer.cli.main import cli
from omlx_worker.cli import main

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "producer", ROOT / "worker")
MAX_HELP = 60
# Modules of the two packages that one module may import. Of a package's `__init__` none is counted.
MAX_OWN_IMPORTS = 10
# These have more; never raise a number, and delete what no module needs.
MORE_OWN_IMPORTS = {
    "omlx_worker.control.worker": 13,
    "omlx_worker.decode.thread": 13,
    "omlx_worker.engine.loading.loader": 24,
}
# What the modules of a room may not import.
WALLS = {
    "omlx_gateway": {"omlx_producer.cli", "omlx_worker", "mlx", "mlx_lm"},
    "omlx_producer": {"omlx_gateway", "omlx_worker", "mlx", "mlx_lm"},
    "omlx_producer.commands": {"omlx_producer.cli"},
    "omlx_worker": {"omlx_producer.cli"},
    "omlx_worker.queue": {
        *(f"omlx_worker.{room}" for room in ("engine", "decode", "control", "delivery")),
        *("mlx", "mlx_lm"),
    },
    "omlx_worker.engine": {
        *(f"omlx_worker.{room}" for room in ("queue", "control", "decode", "delivery")),
        *("redis", "rq"),
    },
    "omlx_worker.decode": {"omlx_worker.control", "redis", "rq", "mlx", "mlx_lm"},
    "omlx_worker.control": {"mlx", "mlx_lm"},
    "omlx_worker.delivery": {"omlx_worker.control", "mlx", "mlx_lm"},
    "omlx_worker.mac": {
        *(f"omlx_worker.{room}" for room in ("engine", "queue", "decode", "control", "delivery")),
        *("mlx", "mlx_lm", "redis", "rq"),
    },
}

# The engine's packages, the lowest first. Its own modules, "", are one of them.
ENGINE = ["rows", "towers", "kernels", "caches", "models", "ragged", "", "loading"]


@cache
def modules() -> dict[str, Path]:
    """All modules of both packages by name. A package has the name of its folder."""
    found = {}
    for source in SOURCES:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports, also inside functions and for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: import by the full name"
            names.update(_origin(node.module, alias.name) for alias in node.names)
    return frozenset(names)


def _origin(module: str, name: str) -> str:
    """The module of ``from module import name``, where the name may be a module itself."""
    inner = f"{module}.{name}"
    return inner if inner in modules() else module


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, in order; empty if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for other in sorted(graph.get(module, ())):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    for module in sorted(graph):
        if found := visit(module):
            return found
    return []


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b", "d"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


@pytest.mark.parametrize("package", ["omlx_producer", "omlx_worker"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    graph = {
        name: {other for other in imported(path) if other in modules()} - {name}
        for name, path in modules().items()
        if within(name, package)
    }
    assert circle(graph) == []


@pytest.mark.parametrize("room", WALLS)
def test_rooms_import_in_one_direction(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        if within(name, room)
        for other in sorted(imported(path))
        if any(within(other, barred) for barred in WALLS[room])
    ]
    assert wrong == []


def test_packages_of_the_engine_import_only_those_below_them() -> None:
    engine = "omlx_worker.engine"

    def height(name: str) -> int:
        inner = modules()[name].relative_to(ROOT / "worker/omlx_worker/engine")
        return ENGINE.index("" if len(inner.parts) == 1 else inner.parts[0])

    inside = {name for name in modules() if within(name, engine)} - {engine}
    wrong = [
        f"{name} imports {other}"
        for name in sorted(inside)
        for other in sorted(imported(modules()[name]) & inside)
        if height(other) > height(name)
    ]
    assert wrong == []


def test_a_module_imports_few_others() -> None:
    counts = {
        name: sum(other in modules() for other in imported(path))
        for name, path in modules().items()
        if path.name != "__init__.py"
    }
    many = {name: count for name, count in counts.items() if count > MAX_OWN_IMPORTS}
    assert {name: n for name, n in many.items() if n > MORE_OWN_IMPORTS.get(name, 0)} == {}
    assert MORE_OWN_IMPORTS.keys() <= many.keys(), "an exception that no module needs any more"


def test_no_test_module_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.search(r"^from tests\.\S*\btest_\w+ import", path.read_text(), re.MULTILINE)
        assert not found, f"{path}: {found and found[0]}; what two of them need is a helper's"


def test_a_class_has_a_name_of_its_own() -> None:
    """Outside of the engine, whose classes no other room names without their modules."""
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        if not within(name, "omlx_worker.engine"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_key_of_rq_is_written_out() -> None:
    """RQ's keys begin with ``RQ_KEY_PREFIX``, which need not be ``rq``."""
    for source in SOURCES:
        for path in (*source.rglob("*.py"), *source.rglob("*.lua")):
            assert not re.search(r"""['"]rq:""", path.read_text()), path


def test_one_room_of_the_worker_knows_macos() -> None:
    names = re.compile("caffeinate|pmset|sysctl|launchctl|IOKit")
    knowing = {name for name, path in modules().items() if names.search(path.read_text())}
    worker = {name for name in knowing if within(name, "omlx_worker")}
    assert {name for name in worker if not within(name, "omlx_worker.mac")} == set()


@pytest.mark.parametrize("group", [cli, main], ids=str)
def test_help_fits_one_line(group: click.Group) -> None:
    lines = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        lines.append(command.get_short_help_str(1000))
        options = (param for param in command.params if isinstance(param, click.Option))
        lines += [(option.help or "").partition("  [")[0] for option in options]
    assert [line for line in lines if len(line) > MAX_HELP] == []
