"""Grows the demo model to a larger cost: `python -m scripts.grown_model.grow --out PATH`."""
