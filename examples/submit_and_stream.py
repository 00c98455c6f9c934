"""Submit a prompt, print its text as it is generated, then its token counts.

Usage: submit_and_stream.py [PROMPT]. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import sys

from omlx_producer import FailedEvent, Producer, TokensEvent


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"
    with Producer() as producer:
        models = producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        job = producer.submit(model=model, prompt=prompt, max_completion_tokens=64, temperature=0)
        for event in job.stream():
            if isinstance(event, TokensEvent):
                print(event.choices[0].text, end="", flush=True)
            elif isinstance(event, FailedEvent):
                sys.exit(f"\njob {job.id} failed: {event.error}")
        usage = job.result().usage
        print(f"\n{usage.prompt_tokens} tokens of prompt, {usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
