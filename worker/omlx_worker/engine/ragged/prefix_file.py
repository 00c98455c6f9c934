"""A file with the beginning of a prompt: what layers keep of a span of its positions.

It is named ``start-end-tokens-digest.safetensors``. ``tokens`` is a hash of the prompt's salt and
of its tokens up to ``end``, ``digest`` one of the file. So a name says what the file holds, and a
file that does not match its name is never used. Nor is one of another user, or with other shapes
than the model's. Wrong numbers cannot be told from right ones: the folder's mode keeps out who
could write them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from omlx_worker.engine.ragged.prefix_arrays import Forms

FORMAT = 2

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]{32})-([0-9a-f]{64})\.safetensors")

_DTYPES = {
    **{mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.bool_: "BOOL"},
    **{mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64"},
    **{mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64"},
}

Tokens: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""


class Unusable(Exception):
    """Why a file is not used."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start`` to ``end`` of a prompt, and a hash of its salt and tokens to ``end``."""

    start: int
    end: int
    tokens: str

    @classmethod
    def of(cls, tokens: Tokens, start: int, salt: str | None = None) -> Span:
        """From ``start`` to the end of ``tokens``."""
        hashed = salted(salt)
        hashed.update(tokens)
        return cls(start, len(tokens), short(hashed))

    @classmethod
    def named(cls, path: Path) -> Span | None:
        """What a file's name says; None if it is not one of these files."""
        if not (name := _NAME.fullmatch(path.name)):
            return None
        return cls(int(name[1]), int(name[2]), name[3])


def salted(salt: str | None) -> hashlib._Hash:
    """A hash of a salt, to be updated with tokens."""
    return hashlib.sha256(hashlib.sha256(salt.encode()).digest() if salt is not None else b"")


def short(hashed: hashlib._Hash) -> str:
    """The hash of tokens in a name."""
    return hashed.hexdigest()[:32]


class Contents:
    """What a file holds.

    Attributes:
        parts: the file, in order; empty until `view`. MLX is not needed to read them.
        nbytes: of all parts.
    """

    def __init__(
        self,
        identity: str,
        tokens: Tokens,
        span: Span,
        pieces: Sequence[mx.array],
        states: Sequence[mx.array],
    ) -> None:
        arrays = {f"piece.{i}": piece for i, piece in enumerate(pieces)}
        arrays |= {f"state.{i}": state for i, state in enumerate(states)}
        arrays["tokens"] = mx.array(tokens.tolist(), mx.uint32)
        self._arrays = list(arrays.values())
        header: dict[str, Any] = {"__metadata__": _metadata(identity, span)}
        end = 0
        for name, part in arrays.items():
            begin, end = end, end + part.nbytes
            kind, shape = _DTYPES[part.dtype], list(part.shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # safetensors aligns arrays
        self._header = [len(text).to_bytes(8, "little"), text]
        self.parts: list[Any] = []
        self.nbytes = 8 + len(text) + end

    def view(self) -> None:
        """Evaluate the arrays. Their views are not copies, and any thread may read them."""
        self.parts = [*self._header, *map(memoryview, self._arrays)]  # type: ignore[arg-type]


def name_of(span: Span, contents: Contents) -> str:
    hashed = hashlib.sha256()
    for part in contents.parts:
        hashed.update(part)
    return f"{span.start}-{span.end}-{span.tokens}-{hashed.hexdigest()}.safetensors"


def read(
    path: Path, identity: str, span: Span, tokens: Tokens, forms: Forms
) -> tuple[list[mx.array], list[mx.array]]:
    """Read the pieces and states of a file.

    Args:
        tokens: of a prompt; the file's must be the same.
        forms: of what the model's layers keep.

    Raises:
        Unusable: if it holds something else.
        OSError: if it cannot be read.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise Unusable("it is another user's")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not path.name.endswith(f"-{digest}.safetensors"):
        raise Unusable("it is damaged")
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert isinstance(arrays, dict)
    assert isinstance(metadata, dict)
    if metadata | {"tokens": span.tokens} != _metadata(identity, span):
        raise Unusable("it belongs to another model or version")
    stored = arrays.pop("tokens")
    if metadata["tokens"] != span.tokens or stored.tolist() != tokens[: span.end].tolist():
        raise Unusable("it holds other tokens")
    wanted = {f"piece.{i}": form for i, form in enumerate(forms.pieces)}
    wanted |= {f"state.{i}": form for i, form in enumerate(forms.states)}
    if arrays.keys() != wanted.keys():
        raise Unusable("it belongs to other layers")
    if not all(form.fits(arrays[name], span.start, span.end) for name, form in wanted.items()):
        raise Unusable("its arrays have other shapes than the model's")
    mx.eval(arrays)
    pieces = [arrays[f"piece.{i}"] for i in range(len(forms.pieces))]
    return pieces, [arrays[f"state.{i}"] for i in range(len(forms.states))]


def _metadata(identity: str, span: Span) -> dict[str, str]:
    return {
        "format": str(FORMAT),
        "identity": identity,
        "start": str(span.start),
        "tokens": span.tokens,
    }


def farthest(spans: Iterable[Span], covered: int) -> Span | None:
    """Of the spans usable once ``covered`` tokens are known, the shortest with the farthest end."""
    reachable = [span for span in spans if span.start <= covered]
    return max(reachable, key=lambda span: (span.end, span.start), default=None)
