"""Chat templates: messages as the text of a prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta, nodes
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils.chat_template_utils import _compile_jinja_template

from omlx_producer.wire import GenerationRequest, InvalidRequest, Message

_VISIBLE = frozenset({"tools", "documents"})
"""Arguments of transformers' `apply_chat_template` that templates see."""

_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_budget": (0, None),
}
"""Variables of templates that switch thinking off and on; None leaves the template's default."""

_LEAST_EFFORTS = ("none", "no_think", "minimal", "low")
"""What templates call no effort, or the least that comes near it; the best first."""

LEADING = ("system", "developer")
"""Roles of messages that begin a chat and hold for all of it."""


_MARK = "=text]"
"""Ends a text that stands for another one; its number begins it."""

_Chat = list[dict[str, Any]]


class _Source(NamedTuple):
    """What a template reads and says."""

    variables: frozenset[str]
    words: frozenset[str]
    channels: bool


class Template:
    """The chat template of one model.

    A template's own defaults hold unless a request says otherwise. A template that refuses a chat,
    or leaves out what its system or user says, gets the same chat in another form: texts as lists
    of parts, turns of the user joined, system messages joined or put before the first text of the
    user, a call a message.

    Args:
        model: its name, for errors.
    """

    def __init__(self, tokenizer: TokenizerWrapper, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        arguments = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
        self._reserved = arguments.keys() - _VISIBLE - _SWITCHES.keys()
        # A tokenizer with a renderer of its own has its switches in its signature.
        self._own_switches = arguments.keys() & _SWITCHES.keys()
        if tokenizer._chat_template is not None:
            self._own_switches |= {tokenizer._thinking_kwarg}

    def text(self, request: GenerationRequest) -> str:
        """The prompt of a request with messages.

        Raises:
            InvalidRequest: if the model has no template or its template does not take them.
        """
        return self._fitting(request)[1]

    def tail(self, request: GenerationRequest, text: str) -> str:
        """What the template has begun of the answer's turn.

        Args:
            text: the prompt of the request.

        Returns:
            The end of the text, without anything of the messages; "" if it cannot be told.
        """
        chat, _ = self._fitting(request)
        arguments = self._arguments(request)
        before = self._write(chat, arguments, begin_answer=False)
        if len(before) < len(text) and text.startswith(before):
            return text[len(before) :]
        # The template begins the answer unasked, or writes a message in another way at the end.
        if chat[-1].get("tool_calls"):
            return ""
        marked = self._write(_marked(chat), arguments, begin_answer=True)
        for written, said in ((marked, _MARK), (text, _said(chat[-1]))):
            _, found, tail = written.rpartition(said or _MARK)
            if found and text.endswith(tail):
                return tail
        return ""

    def _fitting(self, request: GenerationRequest) -> tuple[_Chat, str]:
        """The chat in the first form that the template takes whole, and its prompt."""
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
        arguments = self._arguments(request)
        messages = [_for_template(message) for message in request.messages or ()]
        if self._source(arguments).channels:
            messages = _one_call_each(messages)
        refusal: InvalidRequest | None = None
        for chat in _forms(messages):
            try:
                text = self._write(chat, arguments, begin_answer=True)
                lost = self._lost(chat, arguments, text)
            except InvalidRequest as error:
                refusal = refusal or error
                continue
            if lost is None:
                return chat, text
            refusal = refusal or InvalidRequest(
                "messages",
                f"the chat template of {self._model} does not take them: "
                f"it leaves out what the {lost} says",
            )
        assert refusal is not None
        raise refusal

    def _lost(self, chat: _Chat, arguments: dict[str, Any], text: str) -> str | None:
        """The role of a message that the template has left out; None if it has written all."""
        told = [message for message in chat if message["role"] in (*LEADING, "user")]
        told += [message for message in chat[-1:] if message["role"] == "tool"]
        if all(_said(message) in text for message in told):
            return None
        # Some templates take words such as "/no_think" out of the texts: try with others.
        written = self._write(_marked(chat), arguments, begin_answer=True)
        marks = {id(message): f"[{index}{_MARK}" for index, message in enumerate(chat)}
        return next((m["role"] for m in told if marks[id(m)] not in written), None)

    def _write(self, chat: _Chat, arguments: dict[str, Any], *, begin_answer: bool) -> str:
        # mlx-lm's wrapper would switch the thinking as its vocabulary looks: go past it.
        own = self._tokenizer._chat_template
        write = own or functools.partial(
            self._tokenizer._tokenizer.apply_chat_template, tokenize=False
        )
        try:
            return str(write(chat, add_generation_prompt=begin_answer, **arguments))
        except TemplateError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - a template is a program that came with the model
            why = f"it fails with {type(error).__name__}: {error}"
        raise InvalidRequest(
            "messages",
            f"the chat template of {self._model} does not take them: {_on_one_line(why)}",
        )

    def _arguments(self, request: GenerationRequest) -> dict[str, Any]:
        """The variables for the template: what the request says, and nothing else."""
        arguments: dict[str, Any] = {}
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
        if request.reasoning_effort is not None:
            arguments |= self._effort(request.reasoning_effort, self._source(arguments))
        return arguments | (request.chat_template_kwargs or {})

    def _effort(self, effort: str, source: _Source) -> dict[str, Any]:
        thinks = effort != "none"
        switches = {
            name: values[thinks]
            for name, values in _SWITCHES.items()
            if name in source.variables and values[thinks] is not None
        }
        if thinks:
            names = source.variables & {"reasoning_effort", "thinking_effort"}
            return switches | dict.fromkeys(names, effort)
        least = next((word for word in _LEAST_EFFORTS if word in source.words), "low")
        # A switch does it alone where the template would refuse such an effort.
        if "reasoning_effort" in source.variables and (not switches or least in _LEAST_EFFORTS[:2]):
            switches["reasoning_effort"] = least
        return switches

    def _source(self, arguments: dict[str, Any]) -> _Source:
        inner = self._tokenizer._tokenizer
        if self._tokenizer._chat_template is not None or inner.chat_template is None:
            return _Source(frozenset(self._own_switches), frozenset(), False)
        try:
            source = _read(inner.get_chat_template(tools=arguments.get("tools")))
        except (TemplateError, ValueError) as error:
            raise InvalidRequest(
                "messages",
                f"the chat template of {self._model} cannot be read: {_on_one_line(error)}",
                "send a prompt instead",
            ) from None
        return source._replace(variables=source.variables | self._own_switches)


@functools.lru_cache(8)
def _read(template: str) -> _Source:
    tree = _compile_jinja_template(template).environment.parse(template)
    return _Source(
        frozenset(meta.find_undeclared_variables(tree)),
        frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)),
        "<|channel|>" in template,
    )


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates take it; the arguments of calls are objects in it."""
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            written[name] = value
    if message.reasoning_content:
        # As gpt-oss and LFM2.5 call it.
        written["thinking"] = message.reasoning_content
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


def _one_call_each(messages: _Chat) -> _Chat:
    """Messages with a call at most, each before its result, as templates with channels take them.

    Such a template writes what is said before a call as thinking, from one field only.
    """
    results = {m["tool_call_id"]: m for m in messages if m["role"] == "tool"}
    chat, moved = _Chat(), set[int]()
    for message in messages:
        calls = message.get("tool_calls", ())
        said = {"content": message["content"]}
        if calls and message["content"] and (thought := message.get("reasoning_content")):
            thought = f"{thought}\n{message['content']}"
            said = {"content": "", "reasoning_content": thought, "thinking": thought}
        for index, call in enumerate(calls):
            first = {**message, **said} if not index else {"role": "assistant", "content": ""}
            chat.append(first | {"tool_calls": [call]})
            if (result := results.get(call["id"])) and len(calls) > 1:
                chat.append(result)
                moved.add(id(result))
        if not calls and id(message) not in moved:
            chat.append(message)
    return chat


def _forms(messages: _Chat) -> Iterator[_Chat]:
    """The messages, and in the forms that some templates need instead; the least changed first."""
    seen = list[_Chat]()
    for calls in (messages, _one_call_each(messages)):
        for system in (calls, _one_system(calls), _without_system(calls)):
            for turns in (system, _joined(system)):
                if turns not in seen:
                    seen.append(turns)
                    yield turns
                    yield [_in_parts(message) for message in turns]


def _one_system(messages: _Chat) -> _Chat:
    """One message of the system, the first, in place of all of the system and developer."""
    if not (texts := _of_system(messages)):
        return messages
    return [{"role": "system", "content": texts}, *_others(messages)]


def _without_system(messages: _Chat) -> _Chat:
    """The system's texts before the first one of the user."""
    others = _others(messages)
    first = next((index for index, m in enumerate(others) if m["role"] == "user"), None)
    if not (texts := _of_system(messages)) or first is None:
        return messages
    others[first] = _saying(others[first], f"{texts}\n\n{others[first]['content']}")
    return others


def _joined(messages: _Chat) -> _Chat:
    """One message in place of several of the user in a row."""
    chat = _Chat()
    for role, run in groupby(messages, key=lambda message: message["role"]):
        group = list(run)
        if role == "user":
            text = "\n\n".join(message["content"] for message in group)
            group = [_saying(group[0], text)]
        chat += group
    return chat


def _of_system(messages: _Chat) -> str:
    return "\n\n".join(m["content"] for m in messages if m["role"] in LEADING)


def _others(messages: _Chat) -> _Chat:
    return [message for message in messages if message["role"] not in LEADING]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _marked(chat: _Chat) -> _Chat:
    return [_saying(message, f"[{index}{_MARK}") for index, message in enumerate(chat)]


def _said(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"]).strip()


def _saying(message: dict[str, Any], text: str) -> dict[str, Any]:
    other = message | {"content": text}
    return other if isinstance(message["content"], str) else _in_parts(other)


def _on_one_line(text: object) -> str:
    return " ".join(str(text).split())
