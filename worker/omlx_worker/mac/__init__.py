"""The Mac beneath the worker: power, heat, memory, launchd. No other package knows macOS.

Imports nothing of the project. On other systems everything here answers None or does nothing.
Written from Apple's headers and tested with fakes; nothing here has run on a Mac yet.
"""
