"""One benchmark a module: each docstring says what question it answers and the command."""
