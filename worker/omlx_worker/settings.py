"""The worker's settings: command line, else ``OMLX_QUEUE_*``, else ``.env``, else defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import (
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from omlx_producer.environment import DOTENV, PREFIX, app_folder
from omlx_producer.wire.keys import PRIORITIES, queue_name
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.request import DEFAULT_CHAT_TOKENS, MAX_DRAFT_DEPTH, ModelAlias
from omlx_worker.decode.depth.policies import Mode
from omlx_worker.engine.rows.interface import FIRST_ROWS, HEAD, LOOKUP, NO_DRAFTER
from omlx_worker.logs import LogFormat, LogLevel

MOST_ROWS, USUAL_MOST_ROWS = 1024, 128
"""Rows in a batch at the same time, at most, and where ``max_batch`` is not given."""

MOST_OWN_DRAFTS = 4
"""Drafts per step that are not looked up, at most."""

HTTP_HOST = "127.0.0.1"

REMEDY = "remedy"
"""The type of an error whose message says what to do."""

_ALIAS: TypeAdapter[str] = TypeAdapter(ModelAlias)


class WorkerSettings(BaseSettings):
    """The settings of a worker and the options of ``omlx-worker run``. Times are in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=DOTENV,
        extra="ignore",
        populate_by_name=True,
        env_ignore_empty=True,
    )

    # First: the check of `model` needs it.
    model_alias: ModelAlias | None = Field(
        default=None, description="Name in requests and queues; else the model's."
    )
    model: str = Field(description="A folder, a Hugging Face id, or demo, a toy to try.")
    drafter: Annotated[
        str, Remedy("head, lookup, none or a model, or lookup beside one, as in head,lookup")
    ] = Field(
        default=f"{HEAD},{LOOKUP}",
        description="Who drafts: head or a model, lookup, both, or none.",
    )
    mtp_from: str | None = Field(
        default=None, description="Take its MTP head from this original, named likewise."
    )
    vision_from: str | None = Field(
        default=None, description="Take its vision tower from this original, named likewise."
    )
    redis_url: str | None = Field(
        default=None, description="The Redis server; else REDIS_URL, or this machine."
    )
    embedded_redis: bool = Field(default=False, description="Run a Redis server as a child.")
    redis_dir: Path = Field(
        default_factory=lambda: app_folder() / "redis",
        description="Data folder of the embedded server.",
    )
    allow_eviction: bool = Field(
        default=False, description="Take a Redis that drops jobs when its memory is full."
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ROWS,
        description="Rows at once, at most; else as many as pay, up to 128.",
    )
    default_max_tokens: int = Field(
        default=DEFAULT_CHAT_TOKENS,
        ge=1,
        description="Tokens of a chat that sets no limit, at most.",
    )
    thinking_budget: int | None = Field(
        default=None, ge=0, description="Tokens of thinking of a chat that sets no budget."
    )
    max_pixels: int | None = Field(
        default=None, ge=1024, description="Of a picture, at most; else as many as the model takes."
    )
    mode: Mode = Field(
        default="auto", description="Draft if faster, for a single row, always, never."
    )
    mtp_depth: int = Field(
        default=3,
        ge=0,
        le=MOST_OWN_DRAFTS,
        description="Drafts per step that are not looked up, at most; 0: none.",
    )
    fixed_shapes: bool = Field(
        default=False, description="One text in any company, in half precision too."
    )
    switch_after: float = Field(
        default=600.0,
        gt=0,
        description="Of several models: how long bulk jobs wait for another.",
    )
    burst: bool = Field(default=False, description="End when the queues are empty.")
    name: Annotated[str, Remedy("letters, digits and . _ -")] | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name in RQ; else host, process id and random digits.",
    )
    lease_seconds: float = Field(
        default=30.0, ge=1, le=86_400, description="Seconds that a silent worker keeps its jobs."
    )
    memory_limit: Annotated[ByteSize, Remedy("a size such as 24GB")] | None = Field(
        default=None, description="For model and caches; else what the device allows."
    )
    prefix_cache: Annotated[ByteSize, Remedy("a size such as 2GB, or 0")] | None = Field(
        default=None, description="For shared prefixes; 0 for none, else 1/8 of the limit."
    )
    state_dir: Path = Field(
        default_factory=app_folder, description="Folder of heads, and of which kernels are used."
    )
    allow_sleep: bool = Field(default=False, description="On a Mac: let it sleep while rows run.")
    drain_timeout: float = Field(default=60.0, ge=0, description="For jobs that run at SIGTERM.")
    redis_grace: float = Field(default=600.0, gt=0, description="Seconds that Redis may be away.")
    log_level: LogLevel = Field(default="info", description="Log messages of this level and above.")
    log_format: LogFormat = Field(default="text", description="Lines for people or for programs.")
    log_file: Path | None = Field(
        default=None, description="Log here, 10 MB and three older files; else to stderr."
    )
    http: int | None = Field(
        default=None, ge=1, le=65_535, description="Serve OpenAI's interface at this port."
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Serve metrics for Prometheus at it; 0: any."
    )
    metrics_host: str = Field(default="127.0.0.1", description="The address to serve them at.")

    @field_validator("model")
    @classmethod
    def _has_an_alias(cls, model: str, info: ValidationInfo) -> str:
        if not model.strip():
            raise PydanticCustomError(REMEDY, "give a folder or a Hugging Face id, or demo to try")
        if info.data.get("model_alias") is None:
            try:
                _ALIAS.validate_python(_last_part(model))
            except ValidationError:
                raise PydanticCustomError(
                    REMEDY,
                    "its name holds more than letters, digits and . _ @ / -; "
                    "give it another with --model-alias",
                ) from None
        return model

    @field_validator("drafter")
    @classmethod
    def _is_one_beside_lookup(cls, drafter: str) -> str:
        """Put lookup last."""
        own, *beside = sorted(map(str.strip, drafter.split(",")), key=LOOKUP.__eq__)
        if not own or (beside and (beside != [LOOKUP] or own in (LOOKUP, NO_DRAFTER))):
            raise ValueError(drafter)
        return ",".join([own, *beside])

    @field_validator("mtp_from")
    @classmethod
    def _drafts(cls, original: str | None, info: ValidationInfo) -> str | None:
        drafter = info.data.get("drafter", HEAD)
        if original is not None and HEAD not in drafter.split(","):
            raise PydanticCustomError(
                REMEDY, f"no head drafts with --drafter {drafter}; leave one of the two out"
            )
        return original

    @field_validator("fixed_shapes")
    @classmethod
    def _drafts_in_any_company(cls, fixed: bool, info: ValidationInfo) -> bool:
        if fixed and info.data.get("mode") == "hybrid":
            raise PydanticCustomError(
                REMEDY, "--mode hybrid drafts for a row alone only; give mtp or batched"
            )
        return fixed

    @property
    def most_rows(self) -> int:
        """Rows in the batch, at most. With fixed shapes every step computes as many."""
        return self.max_batch or (FIRST_ROWS if self.fixed_shapes else USUAL_MOST_ROWS)

    @property
    def depth(self) -> int:
        """Drafts a step, at most, in this mode."""
        # Fixed shapes have one depth, and step times, by which auto finds it, are not fixed.
        plain = self.mode == "batched" or (self.mode == "auto" and self.fixed_shapes)
        return 0 if plain else self.mtp_depth

    @property
    def own_drafter(self) -> str:
        """What drafts beside lookups; `LOOKUP` for nothing."""
        return self.drafter.split(",")[0]

    @property
    def lookup_depth(self) -> int:
        """Drafts that are looked up, at most.

        A mode that does not choose the depth has one for all drafts.
        """
        if LOOKUP not in self.drafter.split(",") or not self.depth:
            return 0
        return MAX_DRAFT_DEPTH if self.mode == "auto" else self.depth

    @property
    def alias(self) -> str:
        if self.model_alias is not None:
            return self.model_alias
        return _last_part(self.model)

    @property
    def page(self) -> str | None:
        """The URL of the gateway's page; None without ``http``."""
        return f"http://{HTTP_HOST}:{self.http}/" if self.http else None

    @property
    def queues(self) -> list[str]:
        """The names of the queues that the worker serves, best first."""
        return [queue_name(self.alias, priority) for priority in PRIORITIES]


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model
