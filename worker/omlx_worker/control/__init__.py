"""The main thread: claims, commands, signals, and the worker's record in RQ."""
