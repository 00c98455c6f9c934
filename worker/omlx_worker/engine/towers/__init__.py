"""What looks at pictures: vision towers, and the vectors that they make."""
