"""Ask many questions at once with OpenAI's own client for asyncio, without a server.

Usage: openai_async_client.py [MODEL]. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import asyncio
import sys

from omlx_gateway.openai import AsyncOpenAI


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    async with AsyncOpenAI() as client:

        async def ask(question: str) -> int:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_completion_tokens=32,
            )
            print(f"{question} {answer.choices[0].message.content!r}")
            return answer.usage.completion_tokens if answer.usage else 0

        counts = await asyncio.gather(*(ask(f"What is {n} times {n}?") for n in range(20)))
        print(f"{len(counts)} answers, {sum(counts)} tokens")


if __name__ == "__main__":
    asyncio.run(main())
