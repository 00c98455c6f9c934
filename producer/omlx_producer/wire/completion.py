"""The result of a finished job: an OpenAI response body, with its main parts as attributes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from omlx_producer.wire.embedding import read_vector
from omlx_producer.wire.end import End
from omlx_producer.wire.events import EndEvent, FinishReason, ToolCall, Usage, Wire

# What a body holds beside its head.
_ANSWER = frozenset({"choices", "data", "prompt_logprobs", "usage"})


class AssistantMessage(Wire):
    """The message of a choice in a chat completion.

    Attributes:
        content: None if the model only calls tools.
        reasoning_content: what the model thought, if its text marks that.
        tool_calls: None without any.

    >>> job = producer.submit(messages=[{"role": "user", "content": "Reverse a list."}])
    >>> job.result().choices[0].message
    AssistantMessage(role='assistant', content='...', reasoning_content=None, tool_calls=None)
    """

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Wire):
    """One of the ``n`` answers to a request.

    Attributes:
        text: in every completion, also of a chat; "" beside calls without any.
        message: in a chat completion.
        logprobs: in OpenAI's form, if the request asked for them.
        probabilities: of each text of a decision; together they are 1.
        prompt_logprobs: of a prompt's tokens in vLLM's form, if the request asked for them; those
            of a chat are in the completion.

    >>> job = producer.submit(prompt="def f(x):", n=2, max_completion_tokens=8)
    >>> [choice.index for choice in job.result().choices]
    [0, 1]
    """

    index: int
    text: Annotated[str, BeforeValidator(lambda content: content or "")] = Field(
        validation_alias=AliasChoices("text", AliasPath("message", "content"))
    )
    message: AssistantMessage | None = None
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None
    probabilities: dict[str, float] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _Embedding(Wire):
    embedding: str | list[float]


class _Vectors(Wire):
    data: list[_Embedding] = Field(min_length=1)
    usage: Usage


class _Body(Wire):
    choices: list[Choice] = Field(min_length=1)
    usage: Usage


def answer_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a response body; calls of tools are lines of JSON after it."""
    if "text" in choice:
        return str(choice["text"])
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [json.dumps(call, ensure_ascii=False) for call in calls]
    return "\n".join([*filter(None, [message["content"]]), *lines])


class Completion(dict[str, Any]):
    """The result of a job: a ``chat.completion`` for ``messages``, a ``text_completion`` for a
    ``prompt``, a ``list`` of embeddings for ``input``.

    It is the response body itself, a dict that `json.dumps` takes. The attributes show what the
    body held when it was read.

    Attributes:
        choices: the answers, by index; none for ``input``.
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
        embeds = isinstance(body, dict) and "data" in body
        parsed = (_Vectors if embeds else _Body).model_validate(body)
        super().__init__(body)
        self.choices: list[Choice] = getattr(parsed, "choices", [])
        self.usage: Usage = parsed.usage
        self._data: list[_Embedding] = getattr(parsed, "data", [])

    @property
    def head(self) -> dict[str, Any]:
        """What it says beside the answer; see `omlx_producer.wire.answer`."""
        return {name: value for name, value in self.items() if name not in _ANSWER}

    @property
    def vectors(self) -> list[array[float]]:
        """The vectors of the texts of ``input``, each an array of float32, which
        NumPy takes as it is.

        Raises:
            ValueError: if they cannot be read.
        """
        return [read_vector(each.embedding) for each in self._data]

    @property
    def text(self) -> str:
        """The text of the first choice; "" of vectors."""
        return self.choices[0].text if self.choices else ""

    @property
    def tool_calls(self) -> list[list[ToolCall]]:
        """The calls of each choice; empty if none has any."""
        calls = [(choice.message and choice.message.tool_calls) or [] for choice in self.choices]
        return calls if any(calls) else []

    def end_event(self, job_id: str, n: int, **more: Any) -> EndEvent:
        """The event of its job's end, with more of its fields."""
        return EndEvent.of(
            job_id,
            n,
            End(),
            finish_reasons=[choice.finish_reason for choice in self.choices],
            tool_calls=self.tool_calls,
            usage=self.usage,
            **more,
        )
