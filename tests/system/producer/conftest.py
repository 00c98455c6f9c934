"""Fixtures of a producer whose client is a process."""

from __future__ import annotations

from tests.integration.producer.conftest import job, producer, served

__all__ = ["job", "producer", "served"]
