"""Batched generation with MLX. Knows no Redis and no RQ; nothing else here imports MLX."""
