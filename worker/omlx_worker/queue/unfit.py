"""Servers that never answer as the worker needs it: short of rights, a cluster, other keys."""

from __future__ import annotations

from redis.exceptions import (
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TryAgainError,
)

from omlx_producer.errors import one_line

_CLUSTER = (MovedError, ClusterCrossSlotError, ClusterDownError, TryAgainError)
# For scripts, whose errors have no class.
_CLUSTER_SAYS = ("in a cluster node", "Hash slot not served", "The cluster is down")


class RedisUnfit(ConnectionError):
    """The server cannot serve a worker. The message is one clause that says why."""


def unfit(error: BaseException) -> RedisUnfit | None:
    """What an error of a call says about the server; None if it concerns this call only."""
    if isinstance(error, RedisUnfit):
        return error
    text = str(error)
    if isinstance(error, _CLUSTER) or any(words in text for words in _CLUSTER_SAYS):
        return RedisUnfit("it is a Redis Cluster, and the worker needs all keys on one server")
    if "WRONGTYPE " in text:
        return RedisUnfit(
            f"one of the worker's keys is of another type ({one_line(text)}); delete or rename it"
        )
    # Redis names the user and the command, in scripts too.
    _, found, rights = text.partition(" has no permissions ")
    if found:
        user = text.removesuffix(found + rights).rpartition("User ")[2]
        return RedisUnfit(
            f"user {user} has no permissions {rights.partition(' script: ')[0]}; "
            "grant it with ACL SETUSER"
        )
    return None
