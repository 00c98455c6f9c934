"""Implementations for CUDA, in fewer and larger kernels.

A step of plain operations is many small kernels of a few microseconds each, most of it overhead.
Here projections of the same input are one product. It also does what follows it: an MLP's
activation, or the sum with the residual stream. A gated delta net is a product, three kernels and
another product.
"""
