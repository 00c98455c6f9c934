"""The omlx-queue worker: claims generation jobs from Redis and runs them on one MLX model."""
