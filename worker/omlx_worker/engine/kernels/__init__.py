"""Implementations by device: `device.for_device` chooses them once, when a model is loaded."""
