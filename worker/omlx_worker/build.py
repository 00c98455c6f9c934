"""Makes an engine and its parts from settings."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

from omlx_producer.terminal import in_units
from omlx_producer.wire import ModelInfo
from omlx_worker.engine.rows.interface import ModelError, Tell
from omlx_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from omlx_worker.engine.engine import DecodingEngine
    from omlx_worker.engine.loading.graft import Graft

log = logging.getLogger(__name__)


def describe(settings: WorkerSettings) -> ModelInfo:
    """What the model is by its files.

    Raises:
        ModelError: if they cannot be used.
    """
    info: ModelInfo = _loader().describe(
        settings.model, vision_from=settings.vision_from, max_pixels=settings.max_pixels
    )
    return info


def load_or_end(settings: WorkerSettings, tell: Tell) -> DecodingEngine:
    """`load_engine` in a thread that ends if it fails."""
    try:
        engine = load_engine(settings, tell)
        if engine.head_hint:
            log.warning("%s", engine.head_hint)
        if engine.tower_hint:
            log.info("%s", engine.tower_hint)
        return engine
    except Exception:
        from omlx_worker.engine.engine import end_streams

        end_streams()
        raise


def load_engine(settings: WorkerSettings, tell: Tell = lambda _: None) -> DecodingEngine:
    """Load the model. MLX is imported only here.

    Args:
        tell: told what is done now.

    Raises:
        ModelError: if the model does not exist or cannot be loaded.
    """
    loader = _loader()
    loader.choose_fusion(settings.model)
    engine: DecodingEngine = loader.load_engine(
        settings.model,
        max_rows=settings.most_rows,
        depth=settings.depth,
        graft=graft_of(settings),
        drafter=settings.own_drafter,
        lookup=settings.lookup_depth,
        prefixes=_prefixes(settings),
        chat_tokens=settings.default_max_tokens,
        thinking_budget=settings.thinking_budget,
        vision_from=settings.vision_from,
        max_pixels=settings.max_pixels,
        kernels_dir=settings.state_dir,
        fixed=settings.fixed_shapes,
        tell=tell,
    )
    if settings.memory_limit is not None and engine.weight_bytes >= settings.memory_limit:
        raise ModelError(
            f"--memory-limit: got {in_units(settings.memory_limit)}, but the model's weights alone "
            f"take {in_units(engine.weight_bytes)}; raise it, or take a smaller model"
        )
    return engine


def _loader() -> ModuleType:
    from omlx_worker.engine.loading import loader

    return loader


def graft_of(settings: WorkerSettings) -> Graft | None:
    """Where the model gets its MTP head from; None for its own."""
    from omlx_worker.engine.loading.graft import Graft

    return Graft(settings.mtp_from, settings.state_dir) if settings.mtp_from else None


def _prefixes(settings: WorkerSettings) -> int:
    """Bytes of the prefix cache."""
    from omlx_worker.engine.ragged.footprint import PREFIX_SHARE, budget

    if settings.prefix_cache is not None:
        return settings.prefix_cache
    return (settings.memory_limit or budget()) // PREFIX_SHARE
