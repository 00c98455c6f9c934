"""``omlx-worker demo``: a server, a worker with the demo model, and prompts side by side."""
