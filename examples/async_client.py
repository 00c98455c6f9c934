"""Submit many prompts from asyncio: stream one of them and await the results of all.

The results of any number of jobs are awaited over one connection.
Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import asyncio

from omlx_producer import AsyncJobHandle, AsyncProducer


async def show(job: AsyncJobHandle) -> None:
    async for text in job.text():
        print(text, end="", flush=True)
    print()


async def main() -> None:
    async with AsyncProducer() as producer:
        models = await producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        jobs = await producer.submit_many(
            {"model": model, "prompt": f"# Exercise {number}\ndef ", "max_completion_tokens": 32}
            for number in range(1, 21)
        )
        await show(jobs[0])
        results = await asyncio.gather(*(job.result(timeout=600) for job in jobs))
        tokens = sum(result.usage.completion_tokens for result in results)
        print(f"{len(results)} jobs, {tokens} tokens; the last: {results[-1].text!r}")


if __name__ == "__main__":
    asyncio.run(main())
