"""Servers that answer, but never as the worker needs it: short of rights, or a cluster."""

from __future__ import annotations

from redis.exceptions import (
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TryAgainError,
)

_CLUSTER = (MovedError, ClusterCrossSlotError, ClusterDownError, TryAgainError)
# For scripts, whose errors have no class.
_CLUSTER_SAYS = ("in a cluster node", "Hash slot not served", "The cluster is down")


def says_cluster(error: BaseException) -> bool:
    """Whether an error of a call is one that only servers of a Redis Cluster have."""
    return isinstance(error, _CLUSTER) or any(words in str(error) for words in _CLUSTER_SAYS)


class RedisUnfit(ConnectionError):
    """The server cannot serve a worker. The message is one clause that says why."""


def unfit(error: BaseException) -> RedisUnfit | None:
    """What an error of a call says about the server; None if it concerns this call only."""
    if isinstance(error, RedisUnfit):
        return error
    if says_cluster(error):
        return RedisUnfit("it is a Redis Cluster, and the worker needs all keys on one server")
    # Redis names the user and the command, in scripts too.
    text = str(error)
    _, found, rights = text.partition(" has no permissions ")
    if found:
        user = text.removesuffix(found + rights).rpartition("User ")[2]
        return RedisUnfit(
            f"user {user} has no permissions {rights.partition(' script: ')[0]}; "
            "grant it with ACL SETUSER"
        )
    return None
