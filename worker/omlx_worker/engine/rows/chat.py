"""Chats: messages through the model's template, and how the answer's text is to be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import (
    Calling,
    Constraint,
    GenerationRequest,
    InvalidRequest,
    Markup,
    Message,
)
from omlx_worker.engine.rows.lark import Spelling
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.thinking import Thinking
from omlx_worker.engine.rows.tokens import in_common
from omlx_worker.engine.rows.tools.grammar import CallGrammar
from omlx_worker.engine.rows.tools.parameters import NotWritable
from omlx_worker.engine.rows.tools.reading import CallReader
from omlx_worker.engine.rows.tools.syntax import syntax_of

_LEADING = ("system", "developer")
_VARIABLES = frozenset({"tools", "documents"})
"""Arguments of transformers' `apply_chat_template` that templates see."""

_OTHER = "\u2063"
"""An invisible separator, with which no message is likely to begin."""


class Chat:
    """The chats of one model.

    Args:
        model: its name, for errors.
        encode: turns what a template has written into tokens; by default the tokenizer does.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        model: str,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode or partial(tokenizer.encode, add_special_tokens=False)
        self._model = model
        self._syntax = syntax_of(tokenizer)
        self._spelling = Spelling(tokenizer.get_added_vocab())
        arguments = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
        self._reserved = arguments.keys() - _VARIABLES
        # The last system message asked about, and its tokens: chats of a file often share one.
        self._asked, self._begins = "", list[int]()

    def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt of a request with messages.

        Raises:
            InvalidRequest: if the model has no template or its template does not take them.
        """
        # One of them is a template, which could run for ever; others change what is returned.
        if reserved := self._reserved & (request.chat_template_kwargs or {}).keys():
            raise InvalidRequest(
                "chat_template_kwargs",
                f"{min(reserved)} is no variable of a chat template",
                "leave it out",
            )
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "messages", f"{self._model} has no chat template", "send a prompt instead"
            )
        return self._rendered(request, begin_answer=True)

    def _rendered(self, request: GenerationRequest, *, begin_answer: bool) -> list[int]:
        messages = [_for_template(message) for message in request.messages or ()]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=begin_answer,
                **_template_arguments(request),
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "messages", f"the chat template of {self._model} does not take them: {error}"
            ) from None
        return self._encode(text)

    def shared(self, request: GenerationRequest, prompt: list[int]) -> int:
        """Length of the prompt's beginning that any chat with the same system message has too."""
        messages = request.messages or []
        leading = list(takewhile(lambda message: message.role in _LEADING, messages))
        if not (request.cache and leading) or len(leading) == len(messages):
            return 0
        other = request.model_copy(
            update={"messages": [*leading, Message(role="user", content=_OTHER)]}
        )
        asked = repr((other.messages, _template_arguments(other)))
        if asked != self._asked:
            self._asked = asked
            try:
                self._begins = self.encode(other)
            except InvalidRequest:
                self._begins = []  # the template refuses such a chat
        return in_common(prompt, self._begins)

    def reply(self, request: GenerationRequest, prompt: list[int]) -> ReplyForm | None:
        """How the answers to a request are read; None if they are plain text."""
        tokenizer, calling = self._tokenizer, request.calling
        markers: dict[str, Any] = {}
        if tokenizer.has_thinking:
            markers |= {"think_start": tokenizer.think_start, "think_end": tokenizer.think_end}
            markers["thinks"] = self._thinks(request, prompt)
        if calling is not None and tokenizer.has_tool_calling:
            markers |= {
                "call_start": tokenizer.tool_call_start,
                "call_end": tokenizer.tool_call_end,
            }
        elif calling is not None:
            markers["bare"] = True
        if not markers:
            return None
        by_token, tokens = dict[str, int](), dict[int, str]()
        for marker in filter(lambda marker: isinstance(marker, str), markers.values()):
            if found := self._spelling.token(marker):
                by_token[marker], token, tokens[token] = found
        markup = Markup(**markers, by_token=by_token)
        if calling is None:
            return ReplyForm(markup, tokens=tokens)
        reader = CallReader(tokenizer, calling.functions)
        holds = calling.required or request.constraint is not None
        if holds and reader.is_exact and markup.call_end and markup.call_end not in by_token:
            # An argument may spell this end. Only the reader, as the grammar's inverse, can tell.
            markup = markup.model_copy(update={"call_end": ""})
            return ReplyForm(markup, reader.read_all, None, calling.parallel, tokens)
        return ReplyForm(markup, reader.read, reader.read_cut, calling.parallel, tokens)

    def thinking(self, reply: ReplyForm | None, budget: int | None) -> Thinking | None:
        """How the tokens of answers tell their thinking; None if the model marks none.

        Args:
            reply: how the answers are read.
        """
        tokenizer = self._tokenizer
        if reply is None or not tokenizer.has_thinking:
            return None
        return Thinking(
            tuple(tokenizer.think_start_tokens),
            tuple(tokenizer.think_end_tokens),
            reply.markup.thinks,
            budget,
        )

    def constraint(self, request: GenerationRequest, reply: ReplyForm | None) -> Constraint | None:
        """What the answers to a request must match, calls of tools included.

        Args:
            reply: how the answers are read.

        Raises:
            InvalidRequest: if the calls that it asks for cannot be held to the model's syntax.
        """
        thinks = reply is not None and reply.markup.thinks
        constraint, calling = request.constraint, request.calling
        if calling is not None and (calling.required or calling.strict or constraint):
            grammar = self._grammar(calling, constraint, after_thinking=thinks)
            constraint = Constraint("grammar", grammar)
        if constraint is not None and thinks:
            constraint = replace(constraint, begin_after=self._tokenizer.think_end)
        return constraint

    def _grammar(self, calling: Calling, answer: Constraint | None, *, after_thinking: bool) -> str:
        try:
            if self._syntax is None:
                raise NotWritable("no grammar of their syntax is known")
            added = self._tokenizer.get_added_vocab()
            grammar = CallGrammar(calling, self._syntax, added, after_thinking=after_thinking)
            if calling.required:
                return grammar.required()
            return grammar.free() if answer is None else grammar.beside(answer)
        except NotWritable as reason:
            if calling.required:
                field, remedy = "tool_choice", 'give "auto"'
            elif answer is None:
                field, remedy = "tools", "leave strict out"
            else:
                field, remedy = "response_format", "leave it or the tools out"
            raise InvalidRequest(
                field,
                f"calls by {self._model} cannot be held to their schemas, because {reason}",
                remedy,
            ) from None

    def _thinks(self, request: GenerationRequest, prompt: list[int]) -> bool:
        """Whether the template has opened the thinking. Markers in messages do not count."""

        def opened(tokens: list[int]) -> bool:
            start = self._tokenizer.rfind_think_start(tokens)
            return bool(start > self._tokenizer.rfind_think_end(tokens))

        if not opened(prompt):
            return False
        messages = self._rendered(request, begin_answer=False)
        # Some templates begin the answer unasked; then only the whole prompt can tell.
        return opened(prompt[in_common(prompt, messages) :] or prompt)


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates take it; the arguments of calls are objects in it."""
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            written[name] = value
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.parsed},
            }
            for call in message.tool_calls
        ]
    return written


def _template_arguments(request: GenerationRequest) -> dict[str, Any]:
    """The variables of a chat template. No effort is also no thinking."""
    arguments: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            arguments["enable_thinking"] = False
    if request.tools and request.calling:
        arguments["tools"] = [
            {
                "type": "function",
                "function": {
                    **tool.function.model_dump(exclude_none=True, exclude={"strict"}),
                    "parameters": tool.function.schema_of_arguments,
                },
            }
            for tool in request.tools
        ]
    return arguments | (request.chat_template_kwargs or {})
