"""Requests for vectors: which fields they have, and how vectors travel."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence, Set
from typing import Any, Literal

from omlx_producer.errors import InvalidRequest

EncodingFormat = Literal["base64", "float"]

MAX_TEXTS = 2048
TEXTS_A_JOB = 64
"""Of many texts, so that several workers share them."""

_FIELDS = frozenset(
    {"model", "input", "dimensions", "encoding_format", "cache_salt", "completion_window"}
)


def require_fields_of_vectors(given: Set[str]) -> None:
    """Refuse fields of a text beside ``input``.

    Raises:
        InvalidRequest: for the first of them.
    """
    if others := sorted(given - _FIELDS):
        got = "given beside input, of which vectors are made"
        raise InvalidRequest(others[0], got, "leave it out")


def require_texts(given: Any) -> None:
    """Refuse a list of texts that is too long, mixed, or has an empty one.

    Raises:
        InvalidRequest: names the place and the remedy.
    """
    if not isinstance(given, list) or all(type(each) is int for each in given):
        return
    if len(given) > MAX_TEXTS:
        raise InvalidRequest("input", f"got {len(given)} texts", f"give at most {MAX_TEXTS}")
    if len({type(each) for each in given}) > 1:
        raise InvalidRequest("input", "got values of several kinds", "give texts or lists of ids")
    if (empty := next((at for at, each in enumerate(given) if not each), None)) is not None:
        raise InvalidRequest(f"input[{empty}]", "empty", "give text, or leave it out")


def write_vector(vector: array[float], encoding: EncodingFormat | None) -> str | list[float]:
    """A vector of float32 as a response body holds it.

    Args:
        encoding: by default base64, little-endian as OpenAI has it.
    """
    if encoding == "float":
        return vector.tolist()
    return b64encode(_swapped(vector[:]).tobytes()).decode()


def read_vector(written: str | list[float]) -> array[float]:
    """A vector of a response body.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(written, list):
        return array("f", written)
    vector = array("f", b64decode(written, validate=True))
    return _swapped(vector)


def _swapped(vector: array[float]) -> array[float]:
    """From the machine's byte order to little-endian, and back."""
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def embedding_requests(
    texts: Sequence[str], model: str | None, dimensions: int | None
) -> list[dict[str, Any]]:
    """The requests for the vectors of some texts, in order.

    Raises:
        InvalidRequest: if the texts are a single one.
    """
    if isinstance(texts, str):
        raise InvalidRequest("texts", "got a text", "give a list of texts")
    return [
        {"model": model, "input": [*texts[at : at + TEXTS_A_JOB]], "dimensions": dimensions}
        for at in range(0, len(texts), TEXTS_A_JOB)
    ]
