"""Batched generation with MLX. Knows no Redis and no RQ; only `bench` and `demo` import MLX too."""
