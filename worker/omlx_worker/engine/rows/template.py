"""Chats through the chat template of a model: what it is given, and what it has written.

A template's own defaults hold unless a request says otherwise. Templates differ in what they take:
a message goes through in the first form in which its text comes out again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import GenerationRequest, InvalidRequest, Message
from omlx_worker.engine.rows.tokens import in_common

LEADING = ("system", "developer")
"""Roles of messages that begin a chat and hold for all of it."""

_VARIABLES = frozenset({"tools", "documents"})
"""Arguments of transformers' `apply_chat_template` that templates see."""

_OFF: dict[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "reasoning": False,
    "thinking_budget": 0,
    "thinking_mode": "disabled",
}
"""How templates are told to leave thinking out, each by a variable of its own."""

_ON: dict[str, Any] = {
    "enable_thinking": True,
    "thinking": True,
    "reasoning": True,
    "thinking_mode": "enabled",
}

Written = dict[str, Any]
"""A message as templates take it."""


class Template:
    """The chat template of one model.

    Args:
        model: its name, for errors.
    """

    def __init__(self, tokenizer: TokenizerWrapper, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        arguments = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
        # Of a tokenizer with a renderer of its own, the template is in its arguments.
        self._source = f"{tokenizer.chat_template or ''} {' '.join(arguments)}"
        self._reserved = arguments.keys() - _VARIABLES - _OFF.keys()
        self._has_channels = "<|channel|>" in self._source

    def text(self, request: GenerationRequest) -> str:
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

    def tail(self, request: GenerationRequest, text: str) -> str:
        """What the template has written of the answer at the end of a prompt, its header included.

        Args:
            text: the prompt, from `text`.
        """
        messages = self._rendered(request, begin_answer=False)
        if after := text[in_common(text, messages) :]:
            return after
        # Some templates begin the answer unasked.
        last = request.messages[-1].text.strip() if request.messages else ""
        _, found, after = text.rpartition(last) if last else ("", "", "")
        return after if found else ""

    def _rendered(self, request: GenerationRequest, *, begin_answer: bool) -> str:
        messages = request.messages or []
        leading = [each.text for each in takewhile(lambda each: each.role in LEADING, messages)]
        last = [messages[-1].text] if messages and messages[-1].role == "user" else []
        arguments = self._arguments(request) | {"add_generation_prompt": begin_answer}
        refused: Exception | None = None
        written: str | None = None
        for form in self._forms(messages):
            try:
                text = self._render(form, arguments)
            except (TemplateError, TypeError, ValueError) as error:
                refused = refused or error
                continue
            if all(each.strip() in text for each in (*leading, *last)):
                return text
            # Some templates change a text. They must not lose what holds for all of the chat.
            if written is None and all(each.strip() in text for each in leading):
                written = text
        if written is not None:
            return written
        why = refused or "it leaves the system message out"
        raise InvalidRequest(
            "messages", f"the chat template of {self._model} does not take them: {why}"
        ) from None

    def _render(self, messages: list[Written], arguments: dict[str, Any]) -> str:
        if self._tokenizer._chat_template is not None:
            return str(self._tokenizer._chat_template(messages, **arguments))
        plain = self._tokenizer._tokenizer
        return str(plain.apply_chat_template(messages, tokenize=False, **arguments))

    def _forms(self, messages: Sequence[Message]) -> Iterator[list[Written]]:
        """The messages in each of the forms that templates take, the usual one first."""
        written = [self._written(message) for message in messages]
        written = _a_call_each(written) if self._has_channels else written
        in_system = [
            each | {"role": "system"} if each["role"] == "developer" else each for each in written
        ]
        yield written
        yield in_system
        yield _in_parts(in_system)
        if folded := _folded(in_system):
            yield folded
            yield _in_parts(folded)

    def _written(self, message: Message) -> Written:
        """A message; the arguments of calls are objects in it."""
        written: Written = {"role": message.role, "content": message.text}
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
        if message.reasoning_content and re.search(r"\.thinking\b|\[.thinking.\]", self._source):
            written["thinking"] = message.reasoning_content
        return written

    def _arguments(self, request: GenerationRequest) -> dict[str, Any]:
        """The variables of a chat template. No effort is no thinking, any other is some."""
        arguments: dict[str, Any] = {}
        if (effort := request.reasoning_effort) is not None:
            switches = (_OFF if effort == "none" else _ON).items()
            arguments |= {name: value for name, value in switches if self._reads(name)}
            knows_none = re.search(r"""["']none["']""", self._source)
            if effort != "none" or knows_none:
                arguments["reasoning_effort"] = effort
            elif not arguments:
                # The least is what comes nearest; a budget of no thinking does the rest.
                arguments["reasoning_effort"] = "low"
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

    def _reads(self, variable: str) -> bool:
        return re.search(rf"\b{variable}\b", self._source) is not None


def _in_parts(messages: list[Written]) -> list[Written]:
    """Messages whose content is a list of parts."""
    return [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]


def _folded(messages: list[Written]) -> list[Written] | None:
    """Messages with what begins the chat in the first of the user; None without either."""
    leading = list(takewhile(lambda each: each["role"] in LEADING, messages))
    rest = messages[len(leading) :]
    if not leading or not rest or rest[0]["role"] != "user":
        return None
    texts = [each["content"] for each in (*leading, rest[0])]
    return [rest[0] | {"content": "\n\n".join(texts)}, *rest[1:]]


def _a_call_each(messages: list[Written]) -> list[Written]:
    """Messages with one call at most, each before its result, as harmony has them.

    What is said beside a call is a part of the thinking there.
    """
    results = {each["tool_call_id"]: each for each in messages if each.get("tool_call_id")}
    made, told = list[Written](), set[int]()
    for message in messages:
        if id(message) in told:
            continue
        calls = message.get("tool_calls", ())
        before = "\n".join(filter(None, (message.get("thinking"), message["content"])))
        for number, call in enumerate(calls):
            said = {"thinking": before} if before and not number else {}
            made.append({"role": message["role"], "content": "", "tool_calls": [call], **said})
            if (result := results.get(call["id"])) is not None:
                made.append(result)
                told.add(id(result))
        made += [] if calls else [message]
    return made
