"""Trains, checks and measures the demo model: `python -m scripts.demo_model.train`."""
