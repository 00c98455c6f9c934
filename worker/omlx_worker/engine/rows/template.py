"""stub"""

from __future__ import annotations

import inspect
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import GenerationRequest, InvalidRequest, Message

_VARIABLES = frozenset({"tools", "documents"})


class Template:
    def __init__(self, tokenizer: TokenizerWrapper, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        arguments = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
        self._reserved = arguments.keys() - _VARIABLES

    def text(self, request: GenerationRequest) -> str:
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
        before = self._rendered(request, begin_answer=False)
        common = len(__import__("os").path.commonprefix([text, before]))
        if text[common:]:
            return text[common:]
        last = ((request.messages or [])[-1].text or "").strip()
        at = text.rfind(last)
        return text[at + len(last) :] if last and at >= 0 else ""

    def _rendered(self, request: GenerationRequest, *, begin_answer: bool) -> str:
        messages = [_for_template(message) for message in request.messages or ()]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=begin_answer,
                    **_template_arguments(request),
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "messages", f"the chat template of {self._model} does not take them: {error}"
            ) from None


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
