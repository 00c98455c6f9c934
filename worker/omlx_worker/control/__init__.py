"""The main thread: what is claimed, who runs it, and what RQ is told."""
