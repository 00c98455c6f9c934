"""Run a batch with OpenAI's own client, without a server.

Usage: openai_client.py [MODEL]. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import json
import sys
import time
from typing import Literal

from omlx_gateway.openai import OpenAI

URL: Literal["/v1/completions"] = "/v1/completions"


def row(number: int, model: str) -> bytes:
    body = {"model": model, "prompt": f"# Exercise {number}\ndef ", "max_tokens": 32}
    line = {"custom_id": f"exercise-{number}", "method": "POST", "url": URL, "body": body}
    return json.dumps(line).encode() + b"\n"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    rows = b"".join(row(number, model) for number in range(1, 21))
    with OpenAI() as client:
        file = client.files.create(file=("rows.jsonl", rows), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        while batch.status in ("validating", "in_progress"):
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        if batch.output_file_id is None:
            sys.exit(f"{batch.id} is {batch.status}: {batch.errors}")
        for line in client.files.content(batch.output_file_id).iter_lines():
            answer = json.loads(line)["response"]["body"]
            print(answer["choices"][0]["text"], answer["usage"]["completion_tokens"], "tokens")


if __name__ == "__main__":
    main()
