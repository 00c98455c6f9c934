"""The names of keys, channels and queues in Redis, and the version of payloads."""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

JOB_FUNCTION = "omlx_worker.jobs.generate"
MODELS_KEY = "omlx:models"
EXPIRING_KEY = "omlx:expiring"
"""Jobs and batches with a completion window, by the time at which they are due: expire.lua."""

GROUP_FIELD = "omlx_group"
"""The field of a job's hash that names the group of its submitter; see `ended_key`."""

ENDED_SECONDS = 60
"""How long a stream of ends keeps an entry."""

WIRE_VERSION, WIRE_FIELD = 1, "omlx_wire"
"""The version of payloads, and its field in the hash of a job or batch; absent means 1.

Raise it with every request field that older workers do not know: they leave such jobs to others. A
test holds that.
"""

Priority = Literal["high", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def queue_name(model: str, priority: Priority) -> str:
    """The RQ queue of a model alias at a priority."""
    return f"omlx:{model}:{priority}"


def read_queue_name(queue: str) -> tuple[str, Priority] | None:
    """The model alias and the priority of a queue; None if it is not of this package."""
    found = re.fullmatch(f"omlx:([^:]+):({'|'.join(PRIORITIES)})", queue)
    return None if found is None else (found[1], cast(Priority, found[2]))


def events_key(job_id: str) -> str:
    """The stream of a job's events; it expires with the result."""
    return f"omlx:events:{job_id}"


def tokens_channel(job_id: str) -> str:
    """The pub/sub channel of a job's events."""
    return f"omlx:tokens:{job_id}"


def ended_key(group: str) -> str:
    """The stream of the ends of a group's jobs, with their results."""
    return f"omlx:ended:{group}"


def wake_channel(model: str) -> str:
    """The channel on which producers ring for the workers of a model alias. Any payload will do."""
    return f"omlx:wake:{model}"


def row_job_id(run: str, row: str) -> str:
    """The id of the job of a batch's row, by the row's name."""
    return f"row-{run}-{row}"
