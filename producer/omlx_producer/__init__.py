"""Submit generation jobs to omlx-queue workers and read their tokens; never imports MLX."""
