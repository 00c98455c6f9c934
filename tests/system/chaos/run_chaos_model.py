"""The process of one of several models of a worker that `run_chaos_worker` has forked."""

from __future__ import annotations

import json
import os

VARIABLE = "CHAOS_MODEL_PROCESS"


def main() -> None:
    """Serve a model, and fall over where it is told to."""
    from omlx_worker import model_main
    from omlx_worker.settings import WorkerSettings
    from tests.system.chaos.run_chaos_worker import Orders, disturb

    orders = Orders(**json.loads(os.environ[VARIABLE]))
    disturb(orders)
    # Leases are shorter than users may have them.
    model_main.WorkerSettings = WorkerSettings.model_construct
    model_main.main()
