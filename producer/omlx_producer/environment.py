"""The known variables ``OMLX_QUEUE_*``, and a warning about others and about ``.env``."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from omlx_producer.commands.gone import instead

DOTENV = ".env"
"""A file of variables in the working directory, for commands. The environment wins over it."""

PREFIX = "OMLX_QUEUE_"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
# Producers and gateways read REDIS_URL and ALLOW_EVICTION; all are settings of workers.
KNOWN = frozenset(
    {
        "OMLX_QUEUE_ALLOW_EVICTION",
        "OMLX_QUEUE_ALLOW_SLEEP",
        "OMLX_QUEUE_BURST",
        "OMLX_QUEUE_DEFAULT_MAX_TOKENS",
        "OMLX_QUEUE_DRAFTER",
        "OMLX_QUEUE_DRAIN_TIMEOUT",
        "OMLX_QUEUE_EMBEDDED_REDIS",
        "OMLX_QUEUE_FIXED_SHAPES",
        "OMLX_QUEUE_HTTP",
        "OMLX_QUEUE_LEASE_SECONDS",
        "OMLX_QUEUE_LOG_FILE",
        "OMLX_QUEUE_LOG_FORMAT",
        "OMLX_QUEUE_LOG_LEVEL",
        "OMLX_QUEUE_MAX_BATCH",
        "OMLX_QUEUE_MAX_PIXELS",
        "OMLX_QUEUE_MEMORY_LIMIT",
        "OMLX_QUEUE_METRICS_HOST",
        "OMLX_QUEUE_METRICS_PORT",
        "OMLX_QUEUE_MODE",
        "OMLX_QUEUE_MODEL",
        "OMLX_QUEUE_MODEL_ALIAS",
        "OMLX_QUEUE_MTP_DEPTH",
        "OMLX_QUEUE_MTP_FROM",
        "OMLX_QUEUE_NAME",
        "OMLX_QUEUE_PREFIX_CACHE",
        "OMLX_QUEUE_REDIS_DIR",
        "OMLX_QUEUE_REDIS_GRACE",
        "OMLX_QUEUE_REDIS_URL",
        "OMLX_QUEUE_STATE_DIR",
        "OMLX_QUEUE_SWITCH_AFTER",
        "OMLX_QUEUE_THINKING_BUDGET",
        "OMLX_QUEUE_VISION_FROM",
    }
)


def app_folder() -> Path:
    """This program's folder among the user's data. It may not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "omlx-queue"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "omlx-queue"


def variable_set(*names: str, env_file: str | None = DOTENV) -> str | None:
    """The first of these variables that is not empty, and its file if the environment lacks it.

    None if all are empty. Case does not count.
    """
    file = {} if env_file is None else dotenv_values(env_file)
    places = (("", os.environ), (f" in {env_file}", file))
    for name in names:
        for place, values in places:
            if any(value and each.upper() == name for each, value in values.items()):
                return name + place
    return None


def warn_of_unknown_variables(echo: Callable[[str], object]) -> None:
    """Say which variables ``OMLX_QUEUE_*`` no program here reads. Case does not count.

    Also say which lines of ``.env`` are no variables.

    Args:
        echo: called with each sentence.

    Raises:
        OSError, UnicodeDecodeError: if the file ``.env`` cannot be read.
    """
    names = set(os.environ)
    if Path(DOTENV).is_file():
        # python-dotenv would tell of such a line at each reading, without the file's name.
        logging.getLogger("dotenv.main").setLevel(logging.ERROR)
        with Path(DOTENV).open(encoding="utf-8") as stream:
            for binding in parse_stream(stream):
                if binding.error:
                    # The text of a binding begins with the blank lines before it.
                    text = binding.original.string
                    blank = text[: len(text) - len(text.lstrip())].count("\n")
                    echo(f"{DOTENV}: line {binding.original.line + blank}: not NAME=VALUE")
                elif binding.key is not None:
                    names.add(binding.key)
    for name in sorted(names):
        if name.upper().startswith(PREFIX) and name.upper() not in KNOWN:
            end = name.upper().removeprefix(PREFIX)
            option = f"--{end.lower().replace('_', '-')}"
            near = difflib.get_close_matches(end, [k.removeprefix(PREFIX) for k in KNOWN], n=1)
            remedy = instead("omlx-worker", option) or (
                f"did you mean {PREFIX}{near[0]}?" if near else "no setting has this name; unset it"
            )
            echo(f"{name} has no effect: {remedy}")
