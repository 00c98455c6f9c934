"""``python -m omlx_worker``: what the service manager starts."""

from omlx_worker.cli import main

main(prog_name="omlx-worker")
