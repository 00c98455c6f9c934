"""What `auto` has measured, kept for the worker's next start."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

from omlx_worker.decode.depth.auto import AutoPolicy

log = logging.getLogger("omlx_worker.decode.depth.knowledge")

SAVE_SECONDS = 60.0


class Knowledge:
    """One policy's file.

    Args:
        folder: made when there is something to keep.
        identity: of model, device and software; what was measured with another is not used.
    """

    def __init__(self, policy: AutoPolicy, folder: Path, identity: str) -> None:
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.path = folder / f"auto-{name}.json"
        self._policy = policy
        self._identity = identity
        self._saved_at = time.monotonic()
        if policy.load(self.path, identity):
            log.info("going on from what was measured before: %s", self.path)

    def save(self, *, at_once: bool = False) -> None:
        """Keep what is known, if it was not kept a moment ago."""
        if not at_once and time.monotonic() - self._saved_at < SAVE_SECONDS:
            return
        self._saved_at = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._policy.save(self.path, self._identity)
        except OSError as error:
            log.warning("cannot keep what was measured (%s); the next start measures anew", error)
