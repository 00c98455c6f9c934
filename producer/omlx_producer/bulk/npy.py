"""Vectors as a file of NumPy: an array ``[rows, numbers]`` of float32."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from typing import IO

HEADER_BYTES = 128


def write_npy(vectors: Iterable[array[float] | None], stream: IO[bytes]) -> None:
    """Write a line for each vector, of NaN where there is none.

    Args:
        vectors: of one length, float32 in this machine's byte order.
        stream: an empty file, which is read as version 1.0 of the format.
    """
    stream.write(bytes(HEADER_BYTES))
    rows = size = 0
    for vector in vectors:
        if vector is not None and not size:
            size = len(vector)
            stream.write(_missing(size).tobytes() * rows)
        stream.write((_missing(size) if vector is None else vector).tobytes())
        rows += 1
    # The shape is known at the end alone.
    order = "<" if sys.byteorder == "little" else ">"
    header = f"{{'descr': '{order}f4', 'fortran_order': False, 'shape': ({rows}, {size}), }}"
    prefix = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    stream.seek(0)
    stream.write(prefix + f"{header:{HEADER_BYTES - 11}}\n".encode())


def _missing(size: int) -> array[float]:
    return array("f", [math.nan] * size)
