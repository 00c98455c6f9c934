"""Reads the vision tower of a checkpoint, or of the original that it was converted from."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.errors import one_line
from omlx_worker.engine.loading.checkpoint import WEIGHTS, Original
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.picture import Sight as Sight
from omlx_worker.engine.towers.gemma4 import Gemma4Sight, Gemma4Tower
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
_GEMMA = _Family(
    re.compile(r"(?:model\.)?(?P<name>(?:vision_tower|embed_vision)\..+)"),
    Gemma4Sight,
    Gemma4Tower,
)
_QWENS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES = dict.fromkeys(_QWENS, _QWEN) | {"gemma4": _GEMMA}
"""By the types of models that take pictures here."""

VISION_FROM = "--vision-from"

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
    try:
        tower = family and _read(family, sorted(path.glob(WEIGHTS)), config, max_pixels)
    except _UNUSABLE as error:
        raise _refused(path, error) from None
    if tower is None and max_pixels is not None:
        raise ModelError(f"--max-pixels: leave it out, because {path} has no vision tower")
    return tower


def take_tower(
    name: str, config: Mapping[str, Any], tokenizer: TokenizerWrapper, max_pixels: int | None
) -> Tower:
    """The vision tower of the original checkpoint that a model was converted from, as it is there.

    Args:
        name: of the original, a directory or a Hugging Face repository, in either of which only the
            files that hold the tower are wanted.
        config: of the model, and ``tokenizer``, its own.
        max_pixels: see `read_sight`.

    Raises:
        ModelError: if the original has no tower for it.
    """
    original = Original.find(name, VISION_FROM)
    if original.config.get("model_type") not in FAMILIES:
        raise original.error(
            f"pictures are not read by its family, {original.family}; leave it out"
        )
    original.require_kin(config, tokenizer)
    none = original.error("it has no vision tower; give the repository that the model is made of")
    family = _family_of(original.config)
    if family is None:
        raise none
    index = original.index
    files = sorted({file for tensor, file in index.items() if family.names.fullmatch(tensor)})
    if index and not files:
        raise none
    paths = original.fetch(files or [WEIGHTS], "its vision tower")
    try:
        tower = _read(family, paths, original.config, max_pixels)
    except _UNUSABLE as error:
        raise original.error(f"its vision tower cannot be loaded: {one_line(str(error))}") from None
    if tower is None:
        raise none
    return tower


def tower_hint(config: Mapping[str, Any], model: str) -> str | None:
    """How to get the tower that a model's conversion has dropped, or what takes its pictures.

    Args:
        model: its name.

    Returns:
        None if its family has no towers.
    """
    if (kind := config["model_type"]) not in FAMILIES:
        said = (
            f"pictures are not read by its family, {kind}; use mlx_vlm.server for these, or one of "
        )
        return said + ", ".join(FAMILIES) if config.get("vision_config") else None
    if "image_token_id" not in config:
        return None
    command = f"omlx-worker run -m {shlex.quote(model)} {VISION_FROM} ORIGINAL"
    return (
        f"the model's files have no vision tower; get it with: {command} "
        "(ORIGINAL is the repository that the model was converted from)"
    )


def _read(
    family: _Family, files: Sequence[Path], config: Mapping[str, Any], max_pixels: int | None
) -> Tower | None:
    """The tower in some files of a checkpoint; None if they have none."""
    weights = dict[str, mx.array]()
    for file in files:
        tensors: Any = mx.load(str(file))
        matches = {name: family.names.fullmatch(name) for name in tensors}
        weights |= {match["name"]: tensors[name] for name, match in matches.items() if match}
    if not weights:
        return None
    return family.tower(config, _settings(files[0].parent), max_pixels, weights)


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
