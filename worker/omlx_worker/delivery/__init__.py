"""The traffic thread: tokens and endings to Redis."""
