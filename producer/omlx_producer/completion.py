"""The result of a finished job: an OpenAI response body, with its main parts as attributes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, AliasPath, Field

from omlx_producer.events import FinishReason, Usage, Wire


class AssistantMessage(Wire):
    """The message of a choice in a chat completion.

    >>> job = producer.submit(messages=[{"role": "user", "content": "Reverse a list."}])
    >>> job.result().choices[0].message
    AssistantMessage(role='assistant', content='...')
    """

    role: Literal["assistant"]
    content: str


class Choice(Wire):
    """One of the ``n`` answers to a request.

    Attributes:
        text: in every completion, also of a chat.
        message: in a chat completion.
        logprobs: in OpenAI's form, if the request asked for them.

    >>> job = producer.submit(prompt="def f(x):", n=2, max_completion_tokens=8)
    >>> [choice.index for choice in job.result().choices]
    [0, 1]
    """

    index: int
    text: str = Field(validation_alias=AliasChoices("text", AliasPath("message", "content")))
    message: AssistantMessage | None = None
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None


class _Body(Wire):
    choices: list[Choice] = Field(min_length=1)
    usage: Usage


class Completion(dict[str, Any]):
    """The result of a job: a ``chat.completion`` for ``messages``, else a ``text_completion``.

    It is the response body itself, a dict that `json.dumps` takes. The attributes show what the
    body held when it was read.

    Attributes:
        choices: the answers, by index.
        usage: the token counts of all choices together.

    Raises:
        pydantic.ValidationError: if the body is not that of a completion.

    >>> completion = producer.submit(prompt="def f(x):").result()
    >>> completion.text
    '...'
    >>> completion["usage"]["prompt_tokens"] == completion.usage.prompt_tokens
    True
    """

    def __init__(self, body: dict[str, Any]) -> None:
        parsed = _Body.model_validate(body)
        super().__init__(body)
        self.choices: list[Choice] = parsed.choices
        self.usage: Usage = parsed.usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text
