"""Do something as each of many jobs ends, in whatever order they end.

This takes the place of RQ's callbacks and webhooks: the code runs here, not in a worker.
Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import asyncio

from omlx_producer import AsyncJobHandle, AsyncProducer, JobError


async def after(job: AsyncJobHandle) -> None:
    """Await the end of a job, then write a row, call a URL, submit the next job."""
    try:
        completion = await job.result()
    except JobError as error:
        print(f"failed: {error}")
    else:
        print(f"{completion.usage.completion_tokens} tokens: {completion.text!r}")


async def main() -> None:
    async with AsyncProducer() as producer:
        models = await producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        jobs = await producer.submit_many(
            {
                "model": model,
                "prompt": f"# Exercise {number}\ndef ",
                "max_completion_tokens": length,
            }
            for number, length in enumerate((64, 8, 32), start=1)
        )
        # All waits share one connection.
        await asyncio.gather(*map(after, jobs))


if __name__ == "__main__":
    asyncio.run(main())
