"""Chat templates: messages as the text of a prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta, nodes
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils.chat_template_utils import _compile_jinja_template

from omlx_producer.wire import GenerationRequest, InvalidRequest, Message, TextPart

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

_PICTURE = {"type": "image"}

_Parts = list[dict[str, str]]
_Content = str | _Parts
_Chat = list[dict[str, Any]]


class _Source(NamedTuple):
    """What a template reads and says."""

    variables: frozenset[str]
    words: frozenset[str]
    channels: bool


class Template:
    """The chat template of one model.

    A template's own defaults hold unless a request says otherwise. A template that refuses a chat,
    or leaves out what its system or user says or shows, gets the same chat in another form: texts
    as lists of parts, turns of the user joined, system messages joined or put before the first text
    of the user, a call a message.

    Args:
        model: its name, for errors.
        picture: what the template writes for one; "" if the model takes none.
    """

    def __init__(self, tokenizer: TokenizerWrapper, model: str, picture: str = "") -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._picture = picture
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
        marked = self._write(_marked(chat, end=True), arguments, begin_answer=True)
        for written, said in ((marked, _MARK), (text, _said(chat[-1])[-1])):
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
                f"the chat template of {self._model} does not take them: it leaves out {lost}",
            )
        assert refusal is not None
        raise refusal

    def _lost(self, chat: _Chat, arguments: dict[str, Any], text: str) -> str | None:
        """What the template has left out; None if it has written all."""
        shown = sum(part == _PICTURE for message in chat for part in _parts(message["content"]))
        if shown and text.count(self._picture) < shown:
            return "a picture"
        told = [message for message in chat if message["role"] in (*LEADING, "user")]
        told += [message for message in chat[-1:] if message["role"] == "tool"]
        if all(said in text for message in told for said in _said(message)):
            return None
        # Some templates take words such as "/no_think" out of the texts: try with others.
        others = _marked(chat)
        written = self._write(others, arguments, begin_answer=True)
        marks = {id(message): _said(other) for message, other in zip(chat, others, strict=True)}
        return next(
            (
                f"what the {message['role']} says"
                for message in told
                if not all(mark in written for mark in marks[id(message)])
            ),
            None,
        )

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
    content: _Content = message.text
    if message.pictures:
        shown: list[_Content] = [
            part.text if isinstance(part, TextPart) else [_PICTURE] for part in message.content
        ]
        content = _joint(shown)
    written: dict[str, Any] = {"role": message.role, "content": content}
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
    content = _joint([texts, others[first]["content"]], "\n\n")
    others[first] = others[first] | {"content": content}
    return others


def _joined(messages: _Chat) -> _Chat:
    """One message in place of several of the user in a row."""
    chat = _Chat()
    for role, run in groupby(messages, key=lambda message: message["role"]):
        group = list(run)
        if role == "user":
            content = _joint([message["content"] for message in group], "\n\n")
            group = [group[0] | {"content": content}]
        chat += group
    return chat


def _of_system(messages: _Chat) -> str:
    return "\n\n".join(m["content"] for m in messages if m["role"] in LEADING)


def _others(messages: _Chat) -> _Chat:
    return [message for message in messages if message["role"] not in LEADING]


def _joint(contents: Iterable[_Content], between: str = "") -> _Content:
    """Contents in one: a text, or with pictures the parts, of which no two neighbours are texts."""
    joint: _Parts = []
    for index, content in enumerate(contents):
        for part in [_text_part(between), *_parts(content)] if index else _parts(content):
            if joint and "text" in joint[-1] and "text" in part:
                part = _text_part(joint.pop()["text"] + part["text"])
            if part.get("text") != "":
                joint.append(part)
    if any(part == _PICTURE for part in joint):
        return joint
    return "".join(part["text"] for part in joint)


def _parts(content: _Content) -> _Parts:
    return [_text_part(content)] if isinstance(content, str) else content


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": _parts(message["content"])}


def _marked(chat: _Chat, *, end: bool = False) -> _Chat:
    """A chat with other texts, each of its own.

    Args:
        end: let the last message end with one, also where a picture ends it.
    """
    marked = []
    for index, message in enumerate(chat):
        content: _Content = f"[{index}{_MARK}"
        if not isinstance(message["content"], str):
            content = [
                _text_part(f"[{index}.{place}{_MARK}") if "text" in part else part
                for place, part in enumerate(message["content"])
            ]
            if end and content[-1] == _PICTURE:
                content.append(_text_part(f"[{index}{_MARK}"))
        marked.append(message | {"content": content})
    return marked


def _said(message: dict[str, Any]) -> list[str]:
    """The texts of a message; "" in place of a picture."""
    return [part.get("text", "").strip() for part in _parts(message["content"])]


def _on_one_line(text: object) -> str:
    return " ".join(str(text).split())
