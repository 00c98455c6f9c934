"""Kernels for Metal alone."""
