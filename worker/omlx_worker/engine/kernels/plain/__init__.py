"""The plain forms: MLX's own operations, right on every device."""
