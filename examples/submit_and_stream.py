"""Submit a prompt, print its text as it is generated, then its token counts.

Usage: submit_and_stream.py [PROMPT]. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import sys

from omlx_producer import OmlxQueueError, Producer


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"
    with Producer() as producer:
        models = producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        job = producer.submit(model=model, prompt=prompt, max_completion_tokens=64, temperature=0)
        try:
            for text in job.text():
                print(text, end="", flush=True)
        except OmlxQueueError as error:
            sys.exit(f"\njob {job.id}: {error}")
        usage = job.result().usage
        print(f"\n{usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
