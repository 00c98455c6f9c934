"""The command buffers of a Mac are as large as pays, unless the user says otherwise."""

from __future__ import annotations

import pytest

from omlx_worker.mac.buffers import MEGABYTES, OPERATIONS, held_back, limits, prepare_mlx

GIB = 1 << 30


@pytest.mark.parametrize(
    ("chip", "memory", "wanted"),
    [
        ("Apple M1 Ultra", 128, ("1000", "2000")),
        ("Apple M2 Max", 96, ("1000", "2000")),
        ("Apple M4 Pro", 64, ("1000", "400")),
        ("Apple M4 Pro", 48, ("1000", "400")),
        ("Apple M3", 24, ("1000", None)),
        ("Apple M5 Max", 128, (None, None)),
        ("Apple M10", 128, (None, None)),
        ("Apple processor", 128, (None, None)),
    ],
)
def test_buffers_follow_the_chip_and_its_memory(
    chip: str, memory: int, wanted: tuple[str | None, str | None]
) -> None:
    environment = dict[str, str]()
    prepare_mlx(environment, "darwin", chip, memory * GIB)

    assert tuple(limits(environment).values()) == wanted


def test_what_the_user_has_set_stays() -> None:
    environment = {OPERATIONS: "50", MEGABYTES: "60"}
    prepare_mlx(environment, "darwin", "Apple M1 Ultra", 128 * GIB)

    assert environment == {OPERATIONS: "50", MEGABYTES: "60"}


def test_other_systems_are_left_alone() -> None:
    environment = dict[str, str]()
    prepare_mlx(environment, "linux", "Apple M1 Ultra", 128 * GIB)

    assert not environment


def test_what_buffers_in_flight_hold_back_is_known() -> None:
    assert [round(held_back({MEGABYTES: n}) / GIB, 1) for n in ("2000", "400")] == [7.8, 1.6]
    assert held_back({}) == held_back({MEGABYTES: "many"}) == 0
