"""Let the model call a function, send it the answer, and print what it says then.

Usage: call_tools.py [QUESTION]. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import sys
from itertools import chain
from typing import Any

from omlx_producer import Producer, RequestFields

CITY = {"type": "string", "enum": ["Paris", "Rome"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_temperature", "parameters": PARAMETERS}}]


def get_temperature(city: str) -> str:
    return {"Paris": "21 degrees", "Rome": "27 degrees"}[city]


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "How warm is it in Paris?"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    with Producer() as producer:
        models = producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        fields: RequestFields = {"model": model, "messages": messages, "tools": TOOLS}
        asked = producer.submit({**fields, "tool_choice": "required"}).result()
        messages.append(asked["choices"][0]["message"])
        for call in chain(*asked.tool_calls):
            answer = get_temperature(**call.function.parsed)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        told = producer.submit({**fields, "max_completion_tokens": 64}).result()
        print(f"{told.text}\n{asked.usage.total_tokens + told.usage.total_tokens} tokens")


if __name__ == "__main__":
    main()
