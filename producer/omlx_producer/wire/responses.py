"""Requests for OpenAI's Responses: each becomes the chat that workers know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.wire.openai_fields import counting
from omlx_producer.wire.picture_url import REMEDY
from omlx_producer.wire.request import GenerationRequest

_STORED = ("nothing is stored here", "give all messages in input")
_REFUSED = {
    "access_programs": ("not supported", "remove it"),
    "background": ("not supported", "remove it, or upload a batch"),
    "background_options": ("not supported", "remove it, or upload a batch"),
    "context_management": ("not supported", "shorten input"),
    "conversation": _STORED,
    "image": ("only text is generated", "remove it"),
    "include": ("not supported", "remove it"),
    "moderation": ("not supported", "remove it"),
    "previous_response_id": _STORED,
    "prompt": ("no prompts are stored here", "give input"),
    "top_logprobs": ("not supported here", "give logprobs to /v1/chat/completions"),
    "truncation": ("input is never cut", 'give "disabled" or remove it'),
    # Of chats.
    "logprobs": ("unknown here", "give it to /v1/chat/completions"),
    "max_completion_tokens": ("unknown here", "give max_output_tokens"),
    "max_tokens": ("unknown here", "give max_output_tokens"),
    "messages": ("unknown here", "give input"),
    "n": ("unknown here", "send the request again for another answer"),
    "reasoning_effort": ("unknown here", "give reasoning.effort"),
    "response_format": ("unknown here", "give text.format"),
    "responses": ("unknown field", "remove it"),
}
# Values that ask for what happens anyway.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

_OWN = frozenset({"input", "instructions", "max_output_tokens", "text", "reasoning", "metadata"})
# It limits the calls of built-in tools, of which there are none.
_IGNORED = frozenset({"max_tool_calls"})

_ITEMS = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_SUMMARIES = ("summary", "generate_summary", "context")

# Fields of chats, and the fields of responses that they are made of.
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "verbosity": "text.verbosity",
    "responses.metadata": "metadata",
    "messages": "input",
}


def chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the chat that a request to ``/v1/responses`` asks for.

    Its ``responses`` says that the answer is a response; see `omlx_producer.wire.answer`.

    Raises:
        InvalidRequest: in the names that the request uses.
    """
    fields: dict[str, Any] = counting(body, _OWN | _IGNORED, _REFUSED, _DEFAULTS)
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise InvalidRequest("instructions", f"got {shown(instructions)}", "give text")
    echo = {"instructions": True} if instructions else {}
    if body.get("metadata") is not None:
        echo["metadata"] = body["metadata"]
    messages, places = _messages(body.get("input"))
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
        places.insert(0, "instructions")
    fields |= {"messages": messages, "responses": echo}
    if body.get("max_output_tokens") is not None:
        fields["max_completion_tokens"] = body["max_output_tokens"]
    text = _object(body, "text", ("format", "verbosity"))
    if text.get("verbosity") is not None:
        fields["verbosity"] = text["verbosity"]
    if text.get("format") is not None:
        fields["response_format"] = _response_format(text["format"])
    reasoning = _object(body, "reasoning", ("effort", "max_tokens", *_SUMMARIES))
    if reasoning.get("max_tokens") is not None:
        fields["thinking_token_budget"] = reasoning["max_tokens"]
    if reasoning.get("effort") is not None:
        fields["reasoning_effort"] = reasoning["effort"]
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [_nested(tool) for tool in tools]
    if isinstance(choice := fields.get("tool_choice"), dict):
        fields["tool_choice"] = _nested(choice)
    try:
        # The model may come from elsewhere.
        GenerationRequest.parse({"model": "x", **fields})
    except InvalidRequest as error:
        error.field = _own_name(error.field or "", places)
        raise
    return fields


def _messages(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of an ``input``, and the place there of each."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    if not isinstance(given, list) or not given:
        got = "missing" if given is None else f"got {shown(given)}"
        raise InvalidRequest("input", got, "give text or a list of messages")
    messages, places = list[dict[str, Any]](), list[str]()
    thoughts = ""
    for index, item in enumerate(given):
        place = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise InvalidRequest(place, f"got {shown(item)}", f"give one of {', '.join(_ITEMS)}")
        if unknown := next((name for name in item if name not in _ITEMS[kind]), None):
            raise InvalidRequest(f"{place}.{unknown:.60}", "unknown field", "remove it")
        if kind == "reasoning":
            thoughts += "".join(_texts(item.get("content"), f"{place}.content"))
            continue
        if kind == "function_call_output":
            output = _content(item.get("output"), f"{place}.output")
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            # Calls belong to the turn before them.
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            content = _content(item.get("content"), f"{place}.content")
            message = {"role": item.get("role"), "content": content}
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"], thoughts = thoughts, ""
        messages.append(message)
        places.append(place)
    return messages, places


def _content(given: Any, place: str) -> Any:
    if not isinstance(given, list):
        return given
    parts = []
    for index, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            parts.append(_image(part, f"{place}[{index}]"))
            continue
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise InvalidRequest(
                f"{place}[{index}]",
                f"got {shown(part)}",
                'give {"type": "input_text", "text": "Hello"}, or a picture as '
                '{"type": "input_image", "image_url": "data:image/png;base64,..."}',
            )
        name = _TEXTS[kind]
        parts.append({"type": name, name: part.get(name)})
    return parts


def _image(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise InvalidRequest(f"{place}.file_id", "no files are read", f"give image_url, {REMEDY}")
    image = {"url": part.get("image_url"), "detail": part.get("detail")}
    return {"type": "image_url", "image_url": image}


def _texts(given: Any, place: str) -> list[str]:
    if given is None:
        return []
    parts = given if isinstance(given, list) else [given]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(place, f"got {shown(given)}", "give parts of the type reasoning_text")
    return [str(text) for text in texts]


def _object(body: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    given = body.get(name)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest(name, f"got {shown(given)}", f"give an object with {known[0]}")
    for field in given:
        if field not in known and given[field] is not None:
            raise InvalidRequest(f"{name}.{field:.60}", "not supported", "remove it")
    return given


def _response_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _nested(given: Any) -> Any:
    """A function, or a choice of one, as chats write it; what is none is theirs to refuse."""
    if not isinstance(given, dict) or given.get("type") != "function":
        return given
    inner = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "function", "function": inner}


def _own_name(field: str, places: list[str]) -> str:
    """The field of a response's request that a field of its chat was made of."""
    if found := re.match(r"messages\[(\d+)\]", field):
        inner = field[found.end() :].replace(".image_url.url", ".image_url")
        return places[int(found[1])] + inner
    for name, own in _NAMES.items():
        if f"{field}.".startswith(f"{name}."):
            return own + field[len(name) :]
    return re.sub(r"^(tools\[\d+\]|tool_choice)\.function", r"\1", field)
