"""Fixtures shared by all tests. No test touches a server that it did not start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from omlx_producer import lua
from tests.helpers.cpu_seconds import CpuSeconds
from tests.helpers.hub import Hub, hub_server
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.server_time import moved_source

# How fast examples run says something of the machine, not of what is tested.
for name, examples in (("default", 30), ("all", 300)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fused", action="store_true", help="Let MLX fuse kernels on a CPU.")
    group = parser.getgroup("constraints")
    group.addoption("--constrained-outputs", type=int, default=100, help="To check, of the model.")
    group = parser.getgroup("chaos")
    group.addoption("--chaos-schedules", type=int, default=20, help="Random schedules to run.")
    group.addoption(
        "--chaos-model-schedules", type=int, default=2, help="Random schedules of the demo model."
    )
    group.addoption(
        "--chaos-gateway-schedules", type=int, default=6, help="Random schedules of gateways."
    )
    group.addoption("--chaos-seed", type=int, default=1, help="The seed of the first of them.")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.durations is not None:
        config.pluginmanager.register(CpuSeconds())


@pytest.fixture(autouse=True, scope="session")
def _no_state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers keep what they measure away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMLX_QUEUE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _kernels(pytestconfig: pytest.Config) -> Iterator[None]:
    """MLX fuses nothing on a CPU: see `tests.helpers.fusing`, and the mark `fused`."""
    import mlx.core as mx

    from tests.helpers.fusing import fused

    fuses = pytestconfig.getoption("--fused") or mx.default_device() != mx.cpu
    with fused(fuses), pytest.MonkeyPatch.context() as patch:
        if not fuses:  # Processes of their own trace nothing either.
            patch.setenv("MLX_DISABLE_COMPILE", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_authority() -> Iterator[None]:
    """Every HTTP client reads the authorities that it trusts: 20 ms for those of a system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).parent / "helpers/nobody.pem"))
        yield


@pytest.fixture(autouse=True)
def _fused_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    import mlx.core as mx

    from tests.helpers.fusing import fused

    marked = request.node.get_closest_marker("fused") is not None
    with fused(True) if marked else nullcontext():
        yield
    mx.enable_compile()  # A load of the demo model has turned it off.


@pytest.fixture(scope="session")
def _session_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis_url(_session_server: RedisServer) -> str:
    """The URL of the session's server, empty at the start of the test."""
    with redis.Redis.from_url(_session_server.url) as client:
        client.flushall()
    return _session_server.url


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the session's server, as RQ wants it: it returns bytes."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def server_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that this process loads have a time that a test moves with `server_time.forward`."""
    monkeypatch.setattr(lua, "source", moved_source)


@pytest.fixture
def private_server() -> Iterator[RedisServer]:
    """A server of the test's own, which it may stop, kill, pause and start again."""
    with redis_server() as server:
        yield server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of the test's own, and an empty cache of its files."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import progress_bar_states

    with hub_server() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setitem(progress_bar_states, "_global", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
        yield server
