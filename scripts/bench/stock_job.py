"""A job that generates with mlx-lm on a stock RQ worker: what `pipeline` compares with.

python -m scripts.bench.stock_job redis://127.0.0.1:6379/0 QUEUE MODEL
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from mlx_lm.generate import generate_step
from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from omlx_worker.engine.loading.checkpoint import resolve
from omlx_worker.engine.loading.loader import load

MODEL = "OMLX_STOCK_MODEL"


@cache
def _model() -> tuple[Any, Any]:
    network, tokenizer, _ = load(resolve(os.environ[MODEL]))
    return network, tokenizer


def generate(prompt: str, tokens: int) -> int:
    """Generate tokens and their text; returns the number of tokens."""
    import mlx.core as mx

    network, tokenizer = _model()
    detokenizer = tokenizer.detokenizer
    made = 0
    # As `mlx_lm.stream_generate`, but past end tokens, like all that is compared.
    for token, _ in generate_step(mx.array(tokenizer.encode(prompt)), network, max_tokens=tokens):
        detokenizer.add_token(token)
        made += 1
    detokenizer.finalize()
    return made


def main() -> None:
    url, queue, os.environ[MODEL] = sys.argv[1:]
    connection = Redis.from_url(url)
    queues = [Queue(queue, connection=connection, serializer=JSONSerializer)]
    worker = SimpleWorker(queues, connection=connection, serializer=JSONSerializer)
    worker.log_job_description = False
    worker.work(logging_level="WARNING")


if __name__ == "__main__":
    main()
