"""``omlx-worker check``: how this machine would serve a model."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pydantic import ByteSize

from omlx_producer.terminal import in_units, one_cell
from omlx_worker.build import load_engine
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.generator import SerialDecoder
from omlx_worker.settings import MOST_ROWS, WorkerSettings


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker with this model would have. Sizes are in bytes.

    Attributes:
        engine: ``ragged batch``, or mlx-lm's ``generate_step``, which decodes a row at a time.
        reason: why it is mlx-lm's.
        slow: what the ragged batch runs without its fast form.
        drafts_by: see `Engine.drafters`.
        draft_depth: drafts a step, at most.
        head: where the MTP head came from; None if none drafts.
        head_hint: how to get the head that the model's files lack.
        no_drafts_because: why nothing drafts.
        weights: of the model and of what drafts for it.
        token: of a row's cache for each token.
        sliding: of a row's cache in layers with a sliding window, at most.
        state: of a row's recurrent layers.
        context: tokens of a row, at most.
        rows: of the full context that fit together, up to `MOST_ROWS`.
        kernels: which forms of its layers are used on this device, and how fast they are.
    """

    model: str
    family: str
    engine: str
    reason: str | None
    slow: list[str]
    drafts_by: str | None
    draft_depth: int
    no_drafts_because: str | None
    head: str | None
    head_hint: str | None
    weights: int
    token: int
    sliding: int
    state: int
    context: int
    memory_limit: int
    rows: int
    kernels: list[object]

    def __str__(self) -> str:
        engine = self.engine
        if self.reason:
            pace = ", a row at a time," if engine == SerialDecoder.name else ","
            engine = f"mlx-lm's {engine}{pace} because {self.reason}"
        drafts = f"up to {self.draft_depth} a step by {self.drafts_by}"
        cache = [f"{in_units(self.token)} a token"] if self.token else []
        if self.sliding:
            cache.append(f"up to {in_units(self.sliding)} a row for sliding windows")
        if self.state:
            cache.append(f"{in_units(self.state)} a row for recurrent layers")
        more = "or more " if self.rows == MOST_ROWS else ""
        lines = {
            "model": self.model,
            "family": self.family,
            "engine": engine,
            "slow": "; ".join(self.slow),
            "drafts": drafts if self.drafts_by else f"none: {self.no_drafts_because}",
            "head": f"from {self.head}" if self.head else self.head_hint or "",
            "weights": in_units(self.weights),
            "cache": " + ".join(cache),
            "context": f"{self.context} tokens",
            "rows": f"{self.rows} {more}of the full context fit {in_units(self.memory_limit)}",
        }
        told = [*lines.items(), *(("kernel", str(result)) for result in self.kernels)]
        return "".join(f"{name:<9}{one_cell(value)}\n" for name, value in told if value)


def examine(settings: WorkerSettings) -> Report:
    """Load a model as a worker would.

    Raises:
        ModelError: if it does not exist or cannot be loaded.
    """
    # A prefix cache with a folder would write and delete files beside running workers.
    engine = load_engine(settings.model_copy(update={"prefix_cache": ByteSize(0)}))
    limit = settings.memory_limit or engine.memory_budget
    row = engine.row_bytes
    return Report(
        model=settings.model,
        family=engine.family,
        engine=engine.decoder,
        reason=engine.reason,
        slow=list(engine.slow),
        drafts_by=engine.drafters,
        draft_depth=engine.max_depth,
        no_drafts_because=_objection(settings, engine),
        head=engine.head,
        head_hint=engine.head_hint,
        weights=engine.weight_bytes,
        token=row.token,
        sliding=row.sliding,
        state=row.state,
        context=engine.info.context_length,
        memory_limit=limit,
        rows=min(_rows(engine, limit), settings.max_batch if settings.fixed_shapes else MOST_ROWS),
        kernels=list(engine.forms),
    )


def _objection(settings: WorkerSettings, engine: DecodingEngine) -> str | None:
    if engine.max_depth:
        return None
    if engine.reason:
        return f"{engine.decoder} has no drafts"
    if settings.fixed_shapes and settings.mode == "auto":
        return "with --fixed-shapes only --mode mtp drafts"
    if not settings.depth:
        return "--mode batched or --mtp-depth 0"
    return "the checkpoint has no MTP head, --draft-model names no model, and --no-lookup"


def _rows(engine: DecodingEngine, limit: int) -> int:
    """How many rows of the full context fit, one of which is still reading its prompt."""
    memory = MemoryBudget(limit, engine.weight_bytes, engine.bytes_for)
    context = engine.info.context_length
    most = 1 if engine.decoder == SerialDecoder.name else MOST_ROWS

    def too_many(rows: int) -> bool:
        return not memory.fits([(context, context), *[(0, context)] * (rows - 1)])

    return bisect_left(range(1, most + 1), True, key=too_many)
