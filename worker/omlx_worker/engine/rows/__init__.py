"""What enters and leaves the engine: requests as rows of tokens, and tokens as text."""
