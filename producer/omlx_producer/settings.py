"""Where Redis is: an argument, else the environment, else this machine."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


class Settings(BaseSettings):
    """The environment variables that a producer reads; empty ones count as unset."""

    model_config = SettingsConfigDict(env_ignore_empty=True)

    redis_url: str = Field(
        default=DEFAULT_REDIS_URL,
        validation_alias=AliasChoices("OMLX_QUEUE_REDIS_URL", "REDIS_URL"),
    )


def redis_url(given: str | None = None) -> str:
    """The URL given, else that of ``OMLX_QUEUE_REDIS_URL``, ``REDIS_URL``, or the default."""
    return given or Settings().redis_url


def without_password(url: str) -> str:
    """What may be shown of a Redis URL: neither its user nor its query, which may hold one too."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
