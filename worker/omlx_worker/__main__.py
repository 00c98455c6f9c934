"""``python -m omlx_worker``: the same program, by the interpreter that has it."""

from omlx_worker.cli import main

main(prog_name="omlx-worker")
