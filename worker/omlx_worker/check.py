"""``omlx-worker check``: how this machine would serve a model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from omlx_producer.terminal import in_units, one_cell
from omlx_worker.build import load_engine
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.mac.buffers import held_back, limits
from omlx_worker.settings import MOST_ROWS, WorkerSettings


def examine(settings: WorkerSettings) -> dict[str, Any]:
    """Load a model as a worker would, and say what the worker would have.

    Sizes are in bytes, those of a row's cache under ``token``, ``sliding`` and ``state``. ``rows``
    of the full ``context`` fit together, up to `MOST_ROWS`. ``buffers`` says what limits a command
    buffer, ``kernels`` which forms of the layers are used here, and how fast they are.

    Raises:
        ModelError: if it does not exist or cannot be loaded.
    """
    engine = load_engine(settings)
    limit = settings.memory_limit or engine.memory_budget
    most = settings.most_rows if settings.fixed_shapes else MOST_ROWS
    return {
        "model": settings.model,
        "family": engine.family,
        "slow": list(engine.decoder.slow_parts),
        "drafts_by": engine.drafters,
        "draft_depth": engine.max_depth,
        "no_drafts_because": _objection(settings, engine),
        "head": engine.head,
        "head_hint": engine.head_hint,
        "picture_tokens": engine.info.picture_tokens,
        "tower_hint": engine.tower_hint,
        "answers": engine.answers,
        "weights": engine.weight_bytes,
        "token": engine.decoder.footprint.of_row.token,
        "sliding": engine.decoder.footprint.of_row.sliding,
        "state": engine.decoder.footprint.of_row.state,
        "context": engine.info.context_length,
        "memory_limit": limit,
        "rows": min(_rows(engine, limit), most),
        "buffers": limits(),
        "kernels": engine.contest.results,
    }


def described(found: Mapping[str, Any]) -> str:
    """What `examine` found, a line each."""
    drafts = f"up to {found['draft_depth']} a step by {found['drafts_by']}"
    pictures = f"of up to {found['picture_tokens']} tokens each"
    per_row = {
        "token": "{} a token",
        "sliding": "up to {} a row for sliding windows",
        "state": "{} a row for recurrent layers",
    }
    cache = (text.format(in_units(found[name])) for name, text in per_row.items() if found[name])
    rows = f"{found['rows']} or more" if found["rows"] == MOST_ROWS else found["rows"]
    buffers = (f"{name} {most}" for name, most in found["buffers"].items() if most)
    lines = {
        "model": found["model"],
        "family": found["family"],
        "slow": "; ".join(found["slow"]),
        "drafts": drafts if found["drafts_by"] else f"none: {found['no_drafts_because']}",
        "head": f"from {found['head']}" if found["head"] else found["head_hint"],
        "pictures": pictures if found["picture_tokens"] else found["tower_hint"],
        "answers": found["answers"],
        "weights": in_units(found["weights"]),
        "cache": " + ".join(cache),
        "context": f"{found['context']} tokens",
        "rows": f"{rows} of the full context fit {in_units(found['memory_limit'])}",
        "buffers": ", ".join(buffers),
    }
    told = [*lines.items(), *(("kernel", str(result)) for result in found["kernels"])]
    return "".join(f"{name:<9}{one_cell(value)}\n" for name, value in told if value)


def _objection(settings: WorkerSettings, engine: DecodingEngine) -> str | None:
    if engine.max_depth:
        return None
    if settings.fixed_shapes and settings.mode == "auto":
        return "with --fixed-shapes only --mode mtp drafts"
    if not settings.depth:
        return "--mode batched or --mtp-depth 0"
    return f"--drafter {settings.drafter} names nothing that drafts for this model"


def _rows(engine: DecodingEngine, limit: int) -> int:
    """How many rows of the full context fit, one of which is still reading its prompt."""
    memory = MemoryBudget(limit, engine.weight_bytes, engine.bytes_for, held_back)
    context = engine.info.context_length

    def too_many(rows: int) -> bool:
        return not memory.fits([(context, context), *[(0, context)] * (rows - 1)])

    return bisect_left(range(1, MOST_ROWS + 1), True, key=too_many)
