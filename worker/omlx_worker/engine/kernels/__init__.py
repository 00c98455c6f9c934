"""Recurrences and products written for this engine, and what is used where they do not run."""
