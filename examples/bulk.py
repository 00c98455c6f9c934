"""Run a file of prompts from Python, as omlx-submit run does; run it again to resume.

Usage: bulk.py PROMPTS.txt RESULTS.jsonl, with one prompt a line.
Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import json
import sys
from pathlib import Path

from omlx_producer import Completion, OmlxQueueError, Producer
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.run import run_here
from omlx_producer.bulk.shape import Shape


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = sys.argv[1], Path(sys.argv[2])
    try:
        with Producer() as producer:
            models = producer.models()
            # Any model will do: the one that was announced last.
            model = max(models, key=lambda alias: models[alias].announced_at, default=None)
            shape = Shape(model=model, sampling={"max_completion_tokens": 64})
            options = RunOptions.of(source, "text", shape)
            finished, failed, *_ = run_here(producer, options, output, ordered=True)
    except OmlxQueueError as error:
        sys.exit(f"bulk.py: {error}")
    if not finished:
        sys.exit("interrupted; run it again to resume")
    for row in map(json.loads, output.read_text().splitlines()):
        print(row["custom_id"], Completion(row["response"]["body"]).text)
    if failed:
        sys.exit(f"failed rows: {failed}; see {output}.errors.jsonl")


if __name__ == "__main__":
    main()
