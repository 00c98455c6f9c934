"""How many tokens to draft before each step."""
