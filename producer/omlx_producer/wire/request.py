"""A generation request, in OpenAI's names. Producer and worker check it with the same model."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.chat import MAX_PICTURE_BYTES, MAX_PICTURES, Message
from omlx_producer.wire.embedding import MAX_TEXTS, EncodingFormat, require_fields_of_vectors
from omlx_producer.wire.keys import JOB_FUNCTION
from omlx_producer.wire.openai_fields import fold_request
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.repetition import RepetitionDetection
from omlx_producer.wire.request_part import (
    MAX_PROMPT_CHARACTERS,
    RequestPart,
    json_text,
)
from omlx_producer.wire.structure import Constraint, ResponseFormat, StructuredOutputs
from omlx_producer.wire.tools import (
    MAX_TOOLS,
    Calling,
    Tool,
    ToolChoiceOption,
    calling_of,
    require_callable,
)

MAX_DRAFT_DEPTH = 8
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
DEFAULT_MAX_TOKENS = 256
"""Of a prompt that sets no limit."""
DEFAULT_CHAT_TOKENS = 4096
"""Of a chat that sets no limit, at most, unless its worker has another `--default-max-tokens`."""


ModelAlias = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._@/-]+$"),
    Remedy("a model's alias, 1 to 200 letters, digits and any of . _ @ / -"),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def seconds_of(window: str) -> float:
    """A completion window in seconds."""
    return float(window[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[window[-1]]


def _not_over(window: str) -> str:
    if not seconds_of(window):
        raise PydanticCustomError("window", "is over at once")
    return window


CompletionWindow = Annotated[
    str,
    Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?[smhd]$"),
    AfterValidator(_not_over),
    Remedy('a time such as "24h", "90m" or "30s"'),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    Remedy("up to 16 texts of 512 characters, with names of at most 64"),
]


class ResponseEcho(RequestPart):
    """What a response repeats of its request, beside what its chat says.

    Attributes:
        instructions: whether the first message was given as ``instructions``.
    """

    instructions: bool = False
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Beside the type of a field that leaves tokens out before one is sampled.

    Attributes:
        neutral: the value that leaves none out, of the type that the device takes.
    """

    neutral: float


class GenerationRequest(RequestPart):
    """One generation request.

    A field that is null counts as not given. Fields of OpenAI that change nothing here are accepted
    and dropped; see `omlx_producer.wire.openai_fields`. `omlx_producer.wire.remedy` makes the words
    of the limits, and scripts/request_fields.py the keywords of `submit` and the table of usage.md.

    Sampling fields left at ``None`` take the values of the model's ``generation_config.json``, then
    OpenAI's defaults. ``top_p``, ``min_p`` and ``top_k`` filter the untempered distribution, as
    mlx-lm's `make_sampler` does. The penalties count the prompt and all generated tokens.

    The worker makes a missing seed from the job id, so a retry gives the same text. Drafts change
    neither the distribution nor the text of a seeded request.

    ``input`` asks for vectors of texts and for no text; it goes with few other fields.

    ``prompt_logprobs`` scores the prompt, as ``echo`` with ``logprobs`` does; then
    ``max_completion_tokens`` may be 0, and ``n`` must be 1.

    >>> request = GenerationRequest(model="fake", prompt="def f(x):", temperature=0)
    >>> producer.submit(request).queue
    'omlx:fake:default'
    """

    shape: ClassVar[str] = 'a JSON object such as {"model": "demo", "prompt": "def fibonacci(n):"}'

    model: ModelAlias = Field(description="A model's alias; not needed if only one is served.")
    messages: Annotated[
        Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None,
        Remedy('a list of messages such as {"role": "user", "content": "Hello"}'),
    ] = Field(default=None, description="A chat.")
    prompt: Annotated[
        Prompt
        | Annotated[
            list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS, fail_fast=True)
        ]
        | None,
        Remedy(f"text of 1 to {MAX_PROMPT_CHARACTERS} characters or a list of token ids"),
    ] = Field(default=None, description="A text to continue, or its tokens.")
    input: Annotated[
        Prompt
        | Annotated[
            list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS, fail_fast=True)
        ]
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
        | Annotated[
            list[
                Annotated[
                    list[TokenId],
                    Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS, fail_fast=True),
                ]
            ],
            Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True),
        ]
        | None,
        Remedy(f"a text or its token ids, or a list of up to {MAX_TEXTS} of them"),
    ] = Field(default=None, description="Texts to make vectors of.")
    dimensions: int | None = Field(
        default=None, ge=1, lt=2**31, description="Numbers of a vector; else all that it has."
    )
    encoding_format: EncodingFormat | None = Field(
        default=None, description="How a vector is written; else base64, over HTTP float."
    )
    max_completion_tokens: Annotated[int | None, Remedy("a whole number from 1 to 2147483647")] = (
        Field(
            default=None,
            ge=0,
            lt=2**31,
            description=f"Tokens at most; else {DEFAULT_CHAT_TOKENS}, of a bare prompt "
            f"{DEFAULT_MAX_TOKENS}.",
        )
    )
    thinking_token_budget: Annotated[
        int | None, Remedy("a whole number of at least 0, or -1 for no limit")
    ] = Field(default=None, ge=-1, lt=2**31, description="Think for at most this many tokens.")
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="How much to think, where the chat template reads it."
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 takes the most likely token."
    )
    top_p: Annotated[float | None, Filter(1.0)] = Field(
        default=None,
        gt=0,
        le=1,
        description="Keep the likeliest tokens up to this total probability.",
    )
    top_k: Annotated[int | None, Filter(0)] = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Keep this many of the likeliest tokens; 0 keeps all.",
    )
    min_p: Annotated[float | None, Filter(0.0)] = Field(
        default=None, ge=0, le=1, description="Keep tokens this likely relative to the likeliest."
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=10, description="Above 1 makes repeated tokens less likely."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Subtracted from the logits of repeated tokens."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Subtracted once per occurrence of the token."
    )
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        Remedy(f'up to {MAX_LOGIT_BIASES} numbers from -100 to 100, as {{"<token id>": 5}}'),
    ] = Field(default=None, max_length=MAX_LOGIT_BIASES, description="Add to a token's logit.")
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="The same seed gives the same text."
    )
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="Generate this many choices.")
    stop: Annotated[
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
        Remedy(f"a text or up to {MAX_STOP_STRINGS} texts, each of 1 to 256 characters"),
    ] = Field(default=None, description="Text to stop at.")
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None,
        Remedy(f"a list of up to {MAX_STOP_STRINGS} token ids"),
    ] = Field(default=None, description="Tokens to stop at.")
    ignore_eos: bool = Field(default=False, description="Continue after the end token.")
    repetition_detection: Annotated[
        RepetitionDetection | None,
        Remedy('an object such as {"max_pattern_size": 20, "min_count": 8}'),
    ] = Field(default=None, description="End a text that repeats itself.")
    logprobs: bool = Field(default=False, description="Report log-probabilities.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report this many alternatives; needs logprobs.",
    )
    probabilities: bool = Field(
        default=False, description="Tell each choice's probability; the likeliest is the text."
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Score the prompt, with this many alternatives.",
    )
    echo: bool = Field(default=False, description="Begin the text with the prompt.")
    stream: bool | None = Field(
        default=None, description="Publish tokens at once; the default of all but bulk jobs."
    )
    draft: bool = Field(default=True, description="Draft tokens if the model can.")
    draft_depth: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DRAFT_DEPTH,
        description="Draft at most this many tokens per step.",
    )
    cache: bool = Field(default=True, description="Reuse a prefix that other prompts have read.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Share what was read only among requests with this salt."
    )
    response_format: Annotated[
        ResponseFormat | None, Remedy('an object such as {"type": "json_object"}')
    ] = Field(default=None, description="The answer is JSON, of any form or of a schema.")
    structured_outputs: Annotated[
        StructuredOutputs | None, Remedy('an object such as {"regex": "[0-9]+"}')
    ] = Field(
        default=None, description="The answer matches an expression, texts, a grammar or a schema."
    )
    tools: Annotated[
        Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None,
        Remedy(
            f"a list of 1 to {MAX_TOOLS} functions such as "
            '{"type": "function", "function": {"name": "f"}}'
        ),
    ] = Field(default=None, description="Functions that may be called.")
    tool_choice: Annotated[
        ToolChoiceOption | None,
        Remedy('"auto", "none", "required" or {"type": "function", "function": {"name": "f"}}'),
    ] = Field(default=None, description="Whether functions are called, or which one.")
    parallel_tool_calls: bool = Field(
        default=True, description="Whether an answer may have several calls."
    )
    chat_template_kwargs: Annotated[
        dict[str, JsonValue] | None, Remedy('a JSON object such as {"enable_thinking": false}')
    ] = Field(default=None, description="Variables of the chat template.")
    completion_window: CompletionWindow | None = Field(
        default=None, description="Fail if not finished in this time, as in 24h or 90m."
    )
    responses: Annotated[
        ResponseEcho | None, Remedy("what a request to /v1/responses leaves in its chat")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _fold_openai(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = fold_request(data)
        if isinstance(kwargs := kept.get("chat_template_kwargs"), dict):
            json_text("chat_template_kwargs", kwargs)
        return kept

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.input is not None:
            require_fields_of_vectors(self.model_fields_set)
            return self
        for name in ("dimensions", "encoding_format"):
            if getattr(self, name) is not None:
                raise InvalidRequest(name, "given without input", "leave it out")
        if self.messages is None and self.prompt is None:
            raise InvalidRequest("prompt", "missing", "give a prompt or messages")
        if self.messages is None and self.thinking_token_budget is not None:
            raise InvalidRequest(
                "thinking_token_budget", "given with a prompt", "give messages instead"
            )
        if self.messages is not None and self.prompt is not None:
            raise InvalidRequest("prompt", "given beside messages", "give only one of the two")
        if self.messages is not None:
            characters = sum(message.characters for message in self.messages)
            if characters == 0 and not self.pictures:
                raise InvalidRequest("messages", "none has any text", "give at least one with text")
            if characters > MAX_PROMPT_CHARACTERS:
                raise InvalidRequest(
                    "messages",
                    f"got {characters} characters",
                    f"give at most {MAX_PROMPT_CHARACTERS}",
                )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs",
                f"got {self.top_logprobs} without logprobs",
                "give logprobs too",
            )
        for key in self.logit_bias or ():
            if not re.fullmatch("0|[1-9][0-9]{0,9}", key) or int(key) >= 2**31:
                raise InvalidRequest(
                    "logit_bias", f"got the key {key[:40]!r}", "give token ids as keys, as in '42'"
                )
        return self

    @model_validator(mode="after")
    def _check_pictures(self) -> Self:
        pictures = self.pictures
        if len(pictures) > MAX_PICTURES:
            raise InvalidRequest(
                "messages", f"got {len(pictures)} pictures", f"give at most {MAX_PICTURES}"
            )
        if (size := sum(map(len, pictures.values()))) > MAX_PICTURE_BYTES:
            raise InvalidRequest(
                "messages",
                f"got pictures of {size} bytes",
                f"give at most {MAX_PICTURE_BYTES}, all of a request together",
            )
        if pictures and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs", "given with pictures, which have no scores", "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.echo and self.messages is not None:
            raise InvalidRequest("echo", "given with messages", "give a prompt instead")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            name = "echo" if self.echo else "prompt_logprobs"
            raise InvalidRequest(name, "comes with the whole result", "give stream: false")
        if self.scored_alternatives is not None and self.n > 1:
            name = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequest(
                "n",
                f"got {self.n} beside {name}, which scores the prompt once",
                "give 1, and ask for choices in a request of their own",
            )
        return self

    @model_validator(mode="after")
    def _check_decision(self) -> Self:
        if not self.probabilities:
            return self
        if not self.choices:
            raise InvalidRequest(
                "probabilities", "given without choices", "give a choice of texts too"
            )
        if len(self.choices) > MAX_CHOICES:
            raise InvalidRequest(
                "structured_outputs.choice",
                f"got {len(self.choices)} texts beside probabilities",
                f"give at most {MAX_CHOICES}",
            )
        if self.responses is not None:
            raise InvalidRequest("probabilities", "a response has none", "ask for a chat instead")
        beside = {
            "n": self.n > 1,
            "stream": self.stream,
            "echo": self.echo,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs is not None,
        }
        if given := [name for name, value in beside.items() if value]:
            raise InvalidRequest(
                given[0],
                "given beside probabilities, for which no text is generated",
                "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.tools is not None:
            if self.messages is None:
                raise InvalidRequest("tools", "given with a prompt", "give messages instead")
            require_callable(self.tools, self.tool_choice)
        elif self.tool_choice is not None:
            raise InvalidRequest("tool_choice", "given without tools", "give tools too")
        forms = (
            ("response_format", self.response_format),
            ("structured_outputs", self.structured_outputs),
        )
        given = [name for name, form in forms if form and form.constraint]
        if len(given) > 1:
            raise InvalidRequest(
                "structured_outputs", "given beside response_format", "leave one of the two out"
            )
        calling = self.calling
        if calling and given and (calling.required or self.structured_outputs):
            raise InvalidRequest(
                given[0],
                "given beside tools of which one "
                f"{'must' if calling.required else 'may'} be called",
                "leave one of the two out",
            )
        ends = list(given)
        if calling and (calling.required or calling.strict):
            ends.append("tool_choice" if calling.required else "strict in tools")
        if self.ignore_eos and ends:
            raise InvalidRequest(
                "ignore_eos",
                f"got true beside {ends[0]}, which says where the text ends",
                "leave one of the two out",
            )
        return self

    @property
    def reads(self) -> str:
        """The field of what is read."""
        if self.input is not None:
            return "input"
        return "prompt" if self.messages is None else "messages"

    @property
    def texts(self) -> list[str | list[int]]:
        """What is read and is no chat: the prompt, or the texts to make vectors of."""
        given = self.prompt if self.input is None else self.input
        if given is None:
            return []
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return [*given]

    @property
    def prompt_text(self) -> str:
        """All that is read as text, in the order in which the model reads it."""
        parts = [text if isinstance(text, str) else " ".join(map(str, text)) for text in self.texts]
        return "".join([*parts, *(message.text for message in self.messages or ())])

    @property
    def pictures(self) -> dict[str, bytes]:
        """The files of its pictures, by their fields, in their order."""
        return {
            f"messages[{index}].{field}": data
            for index, message in enumerate(self.messages or ())
            for field, data in message.pictures.items()
        }

    @property
    def choices(self) -> list[str]:
        """The texts of which the answer is one, each once; empty if it may be any other."""
        form = self.structured_outputs
        return list(dict.fromkeys(form.choice or ())) if form else []

    @property
    def constraint(self) -> Constraint | None:
        """What the text must match; None for free text. Calls of tools are not in it."""
        form = self.structured_outputs or self.response_format
        return form.constraint if form else None

    @property
    def constraint_field(self) -> str:
        """The field of `constraint`."""
        if self.structured_outputs is None:
            return "response_format"
        return f"structured_outputs.{self.structured_outputs.means}"

    @property
    def calling(self) -> Calling | None:
        """What the model may call; None for nothing."""
        if not self.tools:
            return None
        return calling_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a choice, as far as a producer knows."""
        if self.input is not None:
            return 0
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return DEFAULT_MAX_TOKENS if self.messages is None else DEFAULT_CHAT_TOKENS

    @property
    def scored_alternatives(self) -> int | None:
        """The likeliest tokens told for each token of the prompt; None if it is not scored."""
        if self.prompt_logprobs is None and self.echo and self.logprobs:
            return self.top_logprobs or 0
        return self.prompt_logprobs

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def window_seconds(self) -> float | None:
        """``completion_window`` in seconds."""
        return None if self.completion_window is None else seconds_of(self.completion_window)

    def to_wire(self) -> dict[str, Any]:
        """The JSON form, without fields at their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, by_alias=True)

    def to_payload(self) -> bytes:
        """The ``data`` of its job."""
        call: list[Any] = [JOB_FUNCTION, None, [], {"request": self.to_wire()}]
        return zlib.compress(json.dumps(call).encode())


FILTERS: dict[str, float] = {
    name: each.neutral
    for name, field in GenerationRequest.model_fields.items()
    for each in field.metadata
    if isinstance(each, Filter)
}
"""The fields that are filters, with their neutral values."""


def text_fields(content: Any, *, chat: bool, system: str | None) -> dict[str, Any]:
    """The fields of a request for a text: a prompt, or with ``chat`` a user message.

    Args:
        content: the text, or in a chat the parts of the message.
    """
    if not chat:
        return {"prompt": content}
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}
