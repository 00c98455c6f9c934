from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from omlx_worker.mac.system import System
from tests.helpers.fake_mac import FakeMac, compile_library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return compile_library(tmp_path_factory.mktemp("mac"))


@pytest.fixture
def mac(library: Path, tmp_path: Path) -> FakeMac:
    """A copy for each test: what a library holds is global."""
    return FakeMac(Path(shutil.copy(library, tmp_path)))


@pytest.fixture
def system(mac: FakeMac) -> System:
    return System(mac.load)
