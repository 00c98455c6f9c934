"""``omlx-worker demo``: a Redis server, two workers with the demo model, prompts, and a table."""
