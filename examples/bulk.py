"""Run a file of prompts from Python, as omlx-submit run does; run it again to resume.

Usage: bulk.py PROMPTS.txt RESULTS.jsonl, with one prompt a line.
Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import sys

from omlx_producer import OmlxQueueError, Producer, read_results


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = sys.argv[1:]
    try:
        with Producer() as producer:
            models = producer.models()
            # Any model will do: the one that was announced last.
            model = max(models, key=lambda alias: models[alias].announced_at, default=None)
            failed = producer.run(
                source, output, ordered=True, model=model, max_completion_tokens=64
            )
    except OmlxQueueError as error:
        sys.exit(f"bulk.py: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; run it again to resume")
    for result in read_results(output):
        print(result.custom_id, result.text)
    if failed:
        sys.exit(f"failed rows: {dict(failed)}; see {output}.errors.jsonl")


if __name__ == "__main__":
    main()
