"""The worker's settings: command line, else ``OMLX_QUEUE_*``, else defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from omlx_producer.protocol import MAX_DRAFT_DEPTH, ModelAlias
from omlx_worker.decode.depth.fixed import Mode

_ALIAS: TypeAdapter[str] = TypeAdapter(ModelAlias)


def app_folder() -> Path:
    """This program's folder among the user's data. It may not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "omlx-queue"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "omlx-queue"


class WorkerSettings(BaseSettings):
    """The settings of a worker. Durations are in seconds.

    Attributes:
        model: ``demo``, a folder, or a Hugging Face id.
        model_alias: the name in requests and queues; by default the last part of ``model``.
        embedded_redis: run a Redis server as a child of the worker.
        redis_dir: the data folder of the embedded server.
        max_batch: rows in the batch at the same time.
        mode: when to draft: ``auto`` if it is faster, ``hybrid`` for a single row, ``mtp``
            always, ``batched`` never.
        mtp_depth: drafts per step, at most, of a model with an MTP head.
        acceptance: the rule for drafts of requests without a seed; see
            `omlx_worker.engine.ragged.speculation`.
        burst: end when the queues are empty.
        name: the worker's name in RQ; by default host, process id and random digits.
        lease_seconds: how long the worker keeps a job without renewing its lease.
        prefill_chunk: prompt tokens read between two decode steps, at most.
        patience: how long a queue or row is passed over for better ones.
        memory_limit: for the model and its caches, also as in ``24GB``; by default what the
            device recommends, or free memory.
        allow_webhooks: the hosts that webhooks of jobs may call; in the environment separated by
            commas.
        calibration: measure step times while there are no jobs, in mode ``auto``.
        state_dir: the folder of measurements that the next start uses.
        drain_timeout: how long running jobs may take after SIGTERM.
        redis_grace: how long Redis may be away before the worker ends with an error.
        stream_ttl: how long a stream is kept if its job has no result.
    """

    model_config = SettingsConfigDict(
        env_prefix="OMLX_QUEUE_", populate_by_name=True, env_ignore_empty=True
    )

    # First: the check of `model` needs it.
    model_alias: ModelAlias | None = None
    model: str = "demo"
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("OMLX_QUEUE_REDIS_URL", "REDIS_URL"),
    )
    embedded_redis: bool = False
    redis_dir: Path = Field(default_factory=lambda: app_folder() / "redis")
    max_batch: int = Field(default=16, ge=1, le=1024)
    mode: Mode = "auto"
    mtp_depth: int = Field(default=3, ge=0, le=MAX_DRAFT_DEPTH)
    acceptance: Literal["coupled", "ratio"] = "coupled"
    burst: bool = False
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    lease_seconds: float = Field(default=30.0, ge=1)
    prefill_chunk: int = Field(default=2048, ge=1)
    patience: float = Field(default=30.0, gt=0)
    memory_limit: ByteSize | None = Field(default=None, gt=0)
    allow_webhooks: Annotated[frozenset[str], NoDecode] = frozenset()
    calibration: bool = True
    state_dir: Path = Field(default_factory=app_folder)
    drain_timeout: float = Field(default=60.0, ge=0)
    redis_grace: float = Field(default=600.0, gt=0)
    stream_ttl: int = Field(default=86_400, ge=60)

    @field_validator("allow_webhooks", mode="before")
    @classmethod
    def _split(cls, hosts: str | Iterable[str]) -> list[str]:
        each = hosts.split(",") if isinstance(hosts, str) else hosts
        return [host.strip().lower() for host in each]

    @field_validator("model")
    @classmethod
    def _has_an_alias(cls, model: str, info: ValidationInfo) -> str:
        if info.data.get("model_alias") is None:
            try:
                _ALIAS.validate_python(_last_part(model))
            except ValidationError:
                raise PydanticCustomError(
                    "alias",
                    "its name holds more than letters, digits and . _ @ / -; "
                    "give it another with --model-alias",
                ) from None
        return model

    @property
    def depth(self) -> int:
        """Drafts a step, at most, in this mode."""
        return 0 if self.mode == "batched" else self.mtp_depth

    @property
    def alias(self) -> str:
        if self.model_alias is not None:
            return self.model_alias
        return _last_part(self.model)


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model
