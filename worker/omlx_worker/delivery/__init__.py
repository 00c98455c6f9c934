"""The traffic thread: writes tokens and endings to Redis."""
