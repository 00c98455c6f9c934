"""What a field may hold: its types, and its limits in words that complete "give ..."."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

LIMITS = ("ge", "gt", "le", "lt", "min_length", "max_length")


@dataclass(frozen=True, slots=True)
class Remedy:
    """Beside the type of a field whose limits do not say what it may hold.

    >>> Name = Annotated[str, Field(pattern=r"^[a-z]+$"), Remedy("small letters")]
    """

    text: str


def kinds_of(field: FieldInfo) -> list[Any]:
    """The types of a field, without None and limits."""
    return [kind for kind, _ in _kinds(field)]


def remedy_of(field: FieldInfo) -> str:
    """What a field may hold.

    Raises:
        TypeError: if its type needs a `Remedy` and has none.
    """
    kinds, beside = _kinds(field), _flat(field.metadata)
    beside += [each for _, more in kinds for each in more]
    if own := next((each.text for each in beside if isinstance(each, Remedy)), None):
        return own
    limits = {
        name: getattr(each, name) for each in beside for name in LIMITS if hasattr(each, name)
    }
    [kind, *others] = [kind for kind, _ in kinds]
    if not others and get_origin(kind) is Literal:
        *names, last = get_args(kind)
        return (
            f"one of {', '.join(names)} and {last}"
            if names
            else f'"{last}", the only one that is served'
        )
    if not others and kind in _WORDS:
        return _WORDS[kind](limits)
    raise TypeError(f"{field.annotation}: has no remedy; give it one")


def _kinds(field: FieldInfo) -> list[tuple[Any, list[Any]]]:
    """The types of a field, each with what is beside it."""
    whole = field.annotation
    parts = get_args(whole) if get_origin(whole) in (Union, UnionType) else (whole,)
    return [_bare(part) for part in parts if part is not NoneType]


def _bare(kind: Any) -> tuple[Any, list[Any]]:
    if get_origin(kind) is not Annotated:
        return kind, []
    return kind.__origin__, _flat(kind.__metadata__)


def _flat(metadata: Iterable[Any]) -> list[Any]:
    parts: list[Any] = []
    for each in metadata:
        parts += each.metadata if isinstance(each, FieldInfo) else [each]
    return parts


def _of_bool(_: dict[str, Any]) -> str:
    return "true or false"


def _of_int(limits: dict[str, Any]) -> str:
    least = limits["ge"]
    if "le" not in limits and "lt" not in limits:
        return f"a whole number of at least {least}"
    most = limits["le"] if "le" in limits else limits["lt"] - 1
    if most == 2**63 - 1:
        return "a whole number that fits 64 bits"
    return f"a whole number from {least} to {most}"


def _of_float(limits: dict[str, Any]) -> str:
    if "gt" in limits:
        most = f" and up to {limits['le']:g}" if "le" in limits else ""
        return f"a number above {limits['gt']:g}{most}"
    if "le" in limits:
        return f"a number from {limits['ge']:g} to {limits['le']:g}"
    return f"a number of at least {limits['ge']:g}"


def _of_text(limits: dict[str, Any]) -> str:
    if "max_length" not in limits:
        return "text"
    return f"a text of {limits['min_length']} to {limits['max_length']} characters"


_WORDS = {bool: _of_bool, int: _of_int, float: _of_float, str: _of_text}
