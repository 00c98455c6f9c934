"""Trains, checks and measures the reading model: `python -m scripts.reading_model.train`."""
