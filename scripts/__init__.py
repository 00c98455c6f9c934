"""Scripts that make the demo model and measure the project; none of them is installed."""
