"""Implementations for CUDA, in fewer and larger kernels.

A step is many small kernels, each of a few microseconds of which its work is a fraction. Here
projections of the same input are one product, which contains its neighbours (an MLP's activation,
the sum with the residual stream), and a gated delta net is a product, three kernels and a product.
"""
