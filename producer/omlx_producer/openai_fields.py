"""OpenAI's request fields that have no counterpart here: ignored, or refused with a reason.

A field is ignored if the text would be the same without it. The fields that are served are those of
`omlx_producer.request.GenerationRequest`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
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
IGNORED_IN_MESSAGES = frozenset({"refusal", "tool_call_id"})
IGNORED_IN_PARTS = frozenset({"prompt_cache_breakpoint"})

_TOOLS = "tools are not supported yet; remove it"
_TOOL_CHOICE = 'tools are not supported yet; give "none" or remove it'
REFUSED = {
    "audio": "only text is generated; remove it",
    "best_of": "not supported; give n for several choices",
    "echo": "the prompt is not repeated in the text; give false or remove it",
    "function_call": _TOOL_CHOICE,
    "functions": _TOOLS,
    "modalities": 'only text is generated; give ["text"] or remove it',
    "moderation": "not supported; remove it",
    "reasoning_effort": "not supported; give what the model's chat template takes instead, as in "
    'chat_template_kwargs {"enable_thinking": false}',
    "suffix": "not supported; remove it",
    "tool_choice": _TOOL_CHOICE,
    "tools": _TOOLS,
    "verbosity": "not supported; ask for the length in the prompt",
    "web_search_options": "web search is not supported; remove it",
}
REFUSED_IN_MESSAGES = {
    "audio": "only text is read; remove it",
    "function_call": _TOOLS,
    "tool_calls": _TOOLS,
}

# Values that ask for what happens anyway.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"], []),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
}


def drop_without_effect(
    fields: Mapping[Any, Any], ignored: Collection[str], refused: Mapping[str, str]
) -> dict[Any, Any]:
    """The fields that count: neither null, nor ignored, nor refused ones at their defaults.

    Raises:
        ValueError: for a refused field, with its name and the reason.
    """
    kept = {}
    for name, value in fields.items():
        if value is None or name in ignored or value in _DEFAULTS.get(name, ()):
            continue
        if name in refused:
            raise ValueError(f"{name}: {refused[name]}")
        kept[name] = value
    return kept


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields of a request that are given and have no effect."""
    return [name for name in fields if name in IGNORED and fields[name] is not None]
