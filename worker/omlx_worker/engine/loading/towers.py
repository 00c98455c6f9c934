"""Reads the vision tower of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.engine.loading.checkpoint import WEIGHTS
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.picture import Sight as Sight
from omlx_worker.engine.towers.qwen3_vl import Qwen3VLSight, Qwen3VLTower
from omlx_worker.engine.towers.tower import Tower as Tower


class _Family(NamedTuple):
    """How models take pictures.

    Attributes:
        names: what their checkpoints, and conversions by mlx-vlm, call a tensor of the tower.
        sight: made of a config, settings of pictures and the most pixels of one.
        tower: made of these and of tensors, by the part of their names called ``name``.
    """

    names: re.Pattern[str]
    sight: Callable[[Mapping[str, Any], Mapping[str, Any], int | None], Sight]
    tower: Callable[
        [Mapping[str, Any], Mapping[str, Any], int | None, Mapping[str, mx.array]], Tower
    ]


_QWEN = _Family(
    re.compile(r"(?:model\.)?(?:language_model\.)?(?:visual|vision_tower)\.(?P<name>.+)"),
    Qwen3VLSight,
    Qwen3VLTower,
)
FAMILIES = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN)
"""By the types of models that take pictures here."""

_UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def read_sight(path: Path, config: Mapping[str, Any], max_pixels: int | None) -> Sight | None:
    """How prompts of a checkpoint show pictures, told without its weights.

    Args:
        max_pixels: of a picture, at most; None for the checkpoint's own limit.

    Returns:
        None for a model that takes none here.

    Raises:
        ModelError: if its files cannot be used.
    """
    if (family := _family_of(config)) is None:
        return None
    try:
        return family.sight(config, _settings(path), max_pixels)
    except _UNUSABLE as error:
        raise _refused(path, error) from None


def read_tower(path: Path, config: Mapping[str, Any], max_pixels: int | None) -> Tower | None:
    """The vision tower of a checkpoint, in float32 without a GPU.

    Args:
        max_pixels: see `read_sight`.

    Returns:
        None for a model that takes no pictures here, or whose files have no tower.

    Raises:
        ModelError: if its files cannot be used, or pixels are limited without a tower.
    """
    family = _family_of(config)
    tower = family and _read(family, path, config, max_pixels)
    if tower is None and max_pixels is not None:
        raise ModelError(f"--max-pixels: leave it out, because {path} has no vision tower")
    return tower


def _read(
    family: _Family, path: Path, config: Mapping[str, Any], max_pixels: int | None
) -> Tower | None:
    try:
        weights = dict[str, mx.array]()
        for file in sorted(path.glob(WEIGHTS)):
            tensors: Any = mx.load(str(file))
            matches = {name: family.names.fullmatch(name) for name in tensors}
            weights |= {match["name"]: tensors[name] for name, match in matches.items() if match}
        return family.tower(config, _settings(path), max_pixels, weights) if weights else None
    except _UNUSABLE as error:
        raise _refused(path, error) from None


def _family_of(config: Mapping[str, Any]) -> _Family | None:
    return FAMILIES.get(config["model_type"]) if config.get("vision_config") else None


def _settings(path: Path) -> dict[str, Any]:
    """What a checkpoint says of pictures. Newer ones say it of all their processors in one file."""
    old, new = path / "preprocessor_config.json", path / "processor_config.json"
    settings: dict[str, Any] = json.loads(old.read_text()) if old.is_file() else {}
    if new.is_file():
        settings |= json.loads(new.read_text()).get("image_processor") or {}
    return settings


def _refused(path: Path, error: Exception) -> ModelError:
    said = one_line(str(error))
    return ModelError(f"--model {path}: its vision tower cannot be loaded: {said}")
