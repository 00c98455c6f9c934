"""What chaos tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.chaos.processes import Nursery
from tests.system.chaos.processes import nursery as open_nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as opened:
        yield opened
