"""The Mac beneath the worker: chip and sleep. No other package knows macOS.

Imports nothing else of the project. On other systems nothing here does anything. It has not run
on a Mac yet.
"""
