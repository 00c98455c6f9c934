"""OpenAI's request fields that have no counterpart here: ignored, or refused with a reason.

A field is ignored if the text would be the same without it. The fields that are served are those of
`omlx_producer.wire.request.GenerationRequest`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.wire.embedding import require_texts
from omlx_producer.wire.json_limits import require_few_values

IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
IGNORED_IN_MESSAGES = frozenset({"annotations", "refusal"})
IGNORED_IN_PARTS = frozenset({"prompt_cache_breakpoint"})
IGNORED_IN_IMAGES = frozenset({"detail"})

_FUNCTIONS = ("no longer OpenAI's", "give tools and tool_choice instead")
REFUSED = {
    "audio": ("only text is generated", "remove it"),
    "best_of": ("not supported", "give n for several choices"),
    "function_call": _FUNCTIONS,
    "functions": _FUNCTIONS,
    "modalities": ("only text is generated", 'give ["text"] or remove it'),
    "moderation": ("not supported", "remove it"),
    "suffix": ("not supported", "remove it"),
    "verbosity": ("not supported", "ask for the length in the prompt"),
    "web_search_options": ("web search is not supported", "remove it"),
}
REFUSED_IN_MESSAGES = {
    "audio": ("only text is read", "remove it"),
    "function_call": ("no longer OpenAI's", "give tool_calls instead"),
}

# Values that ask for what happens anyway.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"], []),
    "suffix": ("",),
    "tool_calls": ([],),
    "tools": ([],),
    "verbosity": ("medium",),
}


def fold_request(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of a request that count, in the names and forms of `GenerationRequest`.

    OpenAI's text completions have their own forms: ``logprobs`` is the number of alternatives, and
    ``prompt`` may be a list of prompts, of which one is served. Without tools, what forbids calls
    has no effect.

    Raises:
        InvalidRequest: names the field; so do the functions below.
    """
    require_few_values(fields)
    kept = counting(fields, IGNORED, REFUSED)
    if "input" in kept:
        require_texts(kept["input"])
    scores = "prompt_logprobs" in kept or (kept.get("echo") and kept.get("logprobs") is not None)
    for name in ("max_tokens", "max_completion_tokens"):
        if not scores and type(kept.get(name)) is int and kept[name] == 0:
            raise InvalidRequest(
                name, "got 0 without prompt_logprobs", "give a whole number of at least 1"
            )
    if "max_tokens" in kept:
        if "max_completion_tokens" in kept:
            raise InvalidRequest(
                "max_tokens", "given beside max_completion_tokens, the same setting", "give one"
            )
        kept["max_completion_tokens"] = kept.pop("max_tokens")
    if isinstance(biases := kept.get("logit_bias"), Mapping):
        # In JSON keys are texts; in Python a token id is a number.
        kept["logit_bias"] = {
            str(token) if type(token) is int and 0 <= token < 2**31 else token: bias
            for token, bias in biases.items()
        }
    if "reasoning" in kept:
        kept |= _of_reasoning(kept.pop("reasoning"), kept)
    if "tools" not in kept:
        if kept.get("parallel_tool_calls") is False:
            del kept["parallel_tool_calls"]
        if kept.get("tool_choice") == "none":
            del kept["tool_choice"]
    prompt, logprobs = kept.get("prompt"), kept.get("logprobs")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest(
                "prompt", f"got a list of {len(prompt)} prompts", "give each a request of its own"
            )
        kept["prompt"] = prompt[0]
    if prompt is not None and type(logprobs) is int and "top_logprobs" not in kept:
        kept["logprobs"], kept["top_logprobs"] = True, logprobs
    return kept


_REASONING = {"max_tokens": "thinking_token_budget", "effort": "reasoning_effort"}


def _of_reasoning(given: Any, beside: Collection[str]) -> dict[str, Any]:
    """The fields that OpenRouter's ``reasoning`` stands for."""
    if not isinstance(given, dict):
        raise InvalidRequest(
            "reasoning", f"got {shown(given)}", 'give an object such as {"max_tokens": 2000}'
        )
    fields = {}
    for name, value in given.items():
        if name not in _REASONING:
            raise InvalidRequest(f"reasoning.{name}", "unknown field", "give max_tokens or effort")
        if _REASONING[name] in beside:
            raise InvalidRequest(
                f"reasoning.{name}",
                f"given beside {_REASONING[name]}, the same setting",
                "give one",
            )
        if value is not None:
            fields[_REASONING[name]] = value
    return fields


def fold_message(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of a message that count. An assistant's turn may have null for content."""
    kept = counting(fields, IGNORED_IN_MESSAGES, REFUSED_IN_MESSAGES)
    if fields.get("role") == "assistant" and fields.get("content") is None:
        kept["content"] = fields.get("refusal") or ""
    elif "content" in fields:
        kept["content"] = fields["content"]
    return kept


def fold_part(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of a part that count; a refusal becomes a text."""
    kept = counting(fields, IGNORED_IN_PARTS, {})
    if kept.get("type") == "refusal":
        kept["type"], kept["text"] = "text", kept.pop("refusal", None)
    return kept


def fold_image(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of a picture that count."""
    return counting(fields, IGNORED_IN_IMAGES, {})


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields of a request that are given and have no effect."""
    ignored = [name for name in fields if name in IGNORED and fields[name] is not None]
    images = [
        part["image_url"]
        for message in _dicts(fields.get("messages"))
        for part in _dicts(message.get("content"))
        if isinstance(part.get("image_url"), dict)
    ]
    return ignored + [
        f"image_url.{name}"
        for name in sorted(IGNORED_IN_IMAGES)
        if any(image.get(name) is not None for image in images)
    ]


def _dicts(given: Any) -> list[dict[Any, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


def counting(
    fields: Mapping[Any, Any],
    ignored: Collection[str],
    refused: Mapping[str, tuple[str, str]],
    defaults: Mapping[str, tuple[Any, ...]] = _DEFAULTS,
) -> dict[Any, Any]:
    """The fields that are neither null, nor ignored, nor at a default.

    Raises:
        InvalidRequest: for a refused one of them.
    """
    kept = {}
    for name, value in fields.items():
        if value is None or name in ignored or value in defaults.get(name, ()):
            continue
        if name in refused:
            raise InvalidRequest(name, *refused[name])
        kept[name] = value
    return kept
