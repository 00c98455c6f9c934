"""The names of keys, channels and queues in Redis, and the version of payloads."""

from __future__ import annotations

import re
from typing import Any, Literal, Self, cast, get_args


class Key(str):
    """The form of a key or channel. Called with names for its places, it gives one key.

    >>> events_key("j1")
    'omlx:events:j1'

    Attributes:
        form: with places such as ``<id>``.
        type: what Redis holds there, as docs/wire.md calls it.
    """

    form: str
    type: str

    __call__ = str.format

    def __new__(cls, form: str, type: str) -> Self:
        self = super().__new__(cls, re.sub("<[a-z]+>", "{}", form))
        self.form, self.type = form, type
        return self


MODELS_KEY = Key("omlx:models", "hash")
workers_key = Key("omlx:workers:<alias>", "hash")
rates_key = Key("omlx:rates:<alias>", "stream")
PAUSED_KEY = Key("omlx:paused", "set")
wake_channel = Key("omlx:wake:<alias>", "channel")
load_key = Key("omlx:load:<alias>", "text")
lead_key = Key("omlx:lead:<queue>", "text")
claim_key = Key("omlx:claim:<worker>", "list")

events_key = Key("omlx:events:<id>", "stream")
tokens_channel = Key("omlx:tokens:<id>", "channel")
EXPIRING_KEY = Key("omlx:expiring", "sorted set")

BATCHES_KEY = Key("omlx:batches", "sorted set")
BATCHES_ENDED_KEY = Key("omlx:batches:ended", "sorted set")
open_key = Key("omlx:batches:<queue>", "sorted set")
batch_key = Key("omlx:batch:<run>", "hash")
batch_waiting_key = Key("omlx:batch:<run>:waiting:<queue>", "list")
batch_running_key = Key("omlx:batch:<run>:running:<queue>", "hash")
batch_results_key = Key("omlx:batch:<run>:results", "hash")

file_key = Key("omlx:file:<id>", "hash")
file_content_key = Key("omlx:file:<id>:content", "list")
FILES_KEY = Key("omlx:http:files", "sorted set")
HTTP_BATCHES_KEY = Key("omlx:http:batches", "sorted set")

KEYS = {name: key for name, key in list(globals().items()) if isinstance(key, Key)}
"""All of them, by the names that they have here and in Lua. docs/wire.md describes them."""

JOB_FUNCTION = "omlx_worker.jobs.generate"

STOP_FIELD = "omlx_stop"
"""The field of a job's hash, "1", that makes workers stop it: they read it when they claim the job,
append to its stream or renew its lease."""

KEEP_SECONDS = 7 * 24 * 3600
"""How long a batch whose rows have all ended is kept, and listed among those that ended."""

WIRE_VERSION, WIRE_FIELD = 2, "omlx_wire"
"""The latest version of requests, which workers of this version know, and the field in the hash of
a job or batch with the version that it needs; absent means 1.

Raise it with every request field that older workers do not know, and mark the field with `Since`:
older workers leave jobs that set it to others. A test holds that.
"""


CONSTANTS = {
    name: value for name, value in list(globals().items()) if name.endswith(("_FIELD", "_SECONDS"))
}
"""Those that have the same names in Lua."""

Priority = Literal["high", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def queue_name(model: str, priority: Priority) -> str:
    """The RQ queue of a model alias at a priority."""
    return f"omlx:{model}:{priority}"


def read_queue_name(queue: str) -> tuple[str, Priority] | None:
    """The model alias and the priority of a queue; None if it is not of this package."""
    found = re.fullmatch(f"omlx:([^:]+):({'|'.join(PRIORITIES)})", queue)
    return None if found is None else (found[1], cast(Priority, found[2]))


def read_version(stored: Any) -> int:
    """What Redis holds in `WIRE_FIELD`."""
    return int(stored) if stored and stored.isdigit() else 1


def row_job_id(run: str, row: str) -> str:
    """The id of the job of a batch's row, by the row's name."""
    return f"row-{run}-{row}"
