"""Servers that answer, but never as the worker needs it: short of rights, or a cluster."""

from __future__ import annotations

from redis.exceptions import ClusterCrossSlotError, ConnectionError, MovedError


class RedisUnfit(ConnectionError):
    """The server cannot serve a worker. The message is one clause that says why."""


def unfit(error: BaseException) -> RedisUnfit | None:
    """What an error of a call says about the server; None if it concerns this call only."""
    if isinstance(error, RedisUnfit):
        return error
    text = str(error)
    if isinstance(error, MovedError | ClusterCrossSlotError) or "in a cluster node" in text:
        return RedisUnfit("it is a Redis Cluster, and the worker needs all keys on one server")
    # Redis names the user and the command, in scripts too.
    _, found, rights = text.partition(" has no permissions ")
    if found:
        user = text.removesuffix(found + rights).rpartition("User ")[2]
        return RedisUnfit(
            f"user {user} has no permissions {rights.partition(' script: ')[0]}; "
            "grant it with ACL SETUSER"
        )
    return None
