"""A plugin of Simon Willison's ``llm``: ``llm -m omlx/qwen "..."`` goes through the queue.

``llm`` finds it by the entry point of this package; nothing else imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import llm
from llm.parts import TextPart
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from omlx_producer.client.models import takes_chats
from omlx_producer.connection import connect, redis_url
from omlx_producer.errors import OmlxQueueError
from omlx_producer.producer import Producer
from omlx_producer.schemas import bounded

# Every command of llm asks for the models.
ANSWER_SECONDS = 1.0


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register the models that workers serve now; none while Redis is away."""
    with (
        contextlib.suppress(RedisError, OmlxQueueError),
        connect(
            redis_url(), socket_connect_timeout=ANSWER_SECONDS, retry=Retry(NoBackoff(), 0)
        ) as connection,
    ):
        for alias in Producer(connection).models(live=True):
            register(QueueModel(alias))


class QueueModel(llm.Model):
    """A model of the queue.

    Args:
        alias: of the model in the queue.
    """

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        temperature: float | None = None
        max_tokens: int | None = None
        seed: int | None = None

    def __init__(self, alias: str) -> None:
        self.model_id = f"omlx/{alias}"
        self._alias = alias

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, **_: Any
    ) -> Iterator[str]:
        """Submit the conversation so far as one job; yields its text.

        The job is cancelled if nobody reads its text to the end.
        """
        fields = prompt.options.model_dump(exclude_none=True)
        if prompt.schema:
            named = {"name": "answer", "schema": bounded(prompt.schema)}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        try:
            with Producer() as producer:
                fields |= _text_of(prompt, chat=takes_chats(producer.models(), self._alias))
                job = producer.submit(fields | {"model": self._alias, "stream": stream})
                try:
                    yield from job.text()
                    usage = job.result().usage
                finally:
                    job.cancel()
        except (OmlxQueueError, RedisError) as error:
            raise llm.ModelError(str(error)) from error
        response.set_usage(input=usage.prompt_tokens, output=usage.completion_tokens)


def _text_of(prompt: llm.Prompt, *, chat: bool) -> dict[str, Any]:
    """The conversation as a field of a request; for a model without chats, as one text."""
    messages = [
        {
            "role": message.role,
            "content": "".join(part.text for part in message.parts if isinstance(part, TextPart)),
        }
        for message in prompt.messages
    ]
    if chat:
        return {"messages": messages}
    return {"prompt": "\n".join(message["content"] for message in messages)}
