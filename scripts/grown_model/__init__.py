"""Grows the demo model to the cost of a larger one: `python -m scripts.grown_model.grow`."""
