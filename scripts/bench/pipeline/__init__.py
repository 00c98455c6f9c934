"""What the queue costs beside the bare engine: `python -m scripts.bench.pipeline`."""
