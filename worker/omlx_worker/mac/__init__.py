"""The Mac beneath the worker: power, heat, memory, launchd. No other package knows macOS.

Imports nothing else of the project. On other systems nothing here does anything. It was written
from Apple's headers and is tested against libraries of the same signatures; it has not run on a
Mac yet.
"""
