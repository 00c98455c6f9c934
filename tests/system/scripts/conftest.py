"""Fixtures of scripts that work on the demo model."""

from __future__ import annotations

from tests.unit.worker.engine.conftest import demo, heldout_prompts

__all__ = ["demo", "heldout_prompts"]
