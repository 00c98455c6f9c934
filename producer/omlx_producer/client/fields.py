"""The keyword arguments of `submit`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from omlx_producer.wire import (
    EncodingFormat,
    Message,
    Priority,
    ReasoningEffort,
    RepetitionDetection,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoiceOption,
)


class RequestFields(TypedDict, total=False):
    """The fields of a request; `GenerationRequest` says what they mean.

    scripts/request_fields.py writes them.

    >>> fields: RequestFields = {"max_completion_tokens": 8, "temperature": 0}
    >>> jobs = [producer.submit(prompt=prompt, **fields) for prompt in ("def f(x):", "def g(x):")]
    """

    model: str | None
    messages: list[Message] | list[dict[str, Any]] | None
    prompt: str | list[int] | None
    input: str | list[int] | list[str] | list[list[int]] | None
    dimensions: int | None
    encoding_format: EncodingFormat | None
    max_tokens: int | None
    max_completion_tokens: int | None
    thinking_token_budget: int | None
    reasoning_effort: ReasoningEffort | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: int | None
    n: int
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool
    repetition_detection: RepetitionDetection | dict[str, Any] | None
    logprobs: bool
    top_logprobs: int | None
    probabilities: bool
    prompt_logprobs: int | None
    echo: bool
    stream: bool | None
    draft: bool
    draft_depth: int | None
    cache: bool
    cache_salt: str | None
    response_format: ResponseFormat | dict[str, Any] | None
    structured_outputs: StructuredOutputs | dict[str, Any] | None
    tools: list[Tool] | list[dict[str, Any]] | None
    tool_choice: ToolChoiceOption | dict[str, Any] | None
    parallel_tool_calls: bool
    chat_template_kwargs: dict[str, Any] | None
    completion_window: str | None


class _Options(TypedDict, total=False):
    priority: Priority
    job_timeout: int
    result_ttl: int
    failure_ttl: int
    require_known_model: bool
    idempotent: bool


class SubmitArguments(RequestFields, _Options, total=False):
    """The keyword arguments of `Producer.submit`."""

    idempotency_key: str | None


class SubmitManyArguments(_Options, total=False):
    """The keyword arguments of `Producer.submit_many`."""

    idempotency_keys: Sequence[str | None] | None
