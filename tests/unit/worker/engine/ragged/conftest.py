from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.prefixes import Starts
from tests.helpers.readers import Reader, StandIn


@pytest.fixture
def start(tmp_path: Path, reader: Reader) -> Iterator[Starts]:
    starts = Starts(tmp_path, reader)
    yield starts
    starts.end()


@pytest.fixture
def reader() -> Reader:
    return StandIn("all", "recurrent", "sliding")
