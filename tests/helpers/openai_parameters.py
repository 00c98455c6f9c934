"""Every parameter of OpenAI's chats, and what becomes of it."""

from __future__ import annotations

from typing import Any

# Every parameter of OpenAI's chats with a value that is not its default, and what becomes of it.
CHATS: dict[str, tuple[str, Any]] = {
    "audio": ("refused", {"format": "wav", "voice": "alloy"}),
    "frequency_penalty": ("served", 1.5),
    "function_call": ("refused", "auto"),
    "functions": ("refused", [{"name": "f"}]),
    "logit_bias": ("served", {"5": 10}),
    "logprobs": ("served", True),
    "max_completion_tokens": ("served", 5),
    "max_tokens": ("served", 5),
    "messages": ("served", [{"role": "user", "content": "other"}]),
    "metadata": ("ignored", {"a": "b"}),
    "modalities": ("refused", ["text", "audio"]),
    "model": ("served", "demo"),
    "moderation": ("refused", {"model": "m"}),
    "n": ("served", 2),
    "parallel_tool_calls": ("served", False),
    "prediction": ("ignored", {"type": "content", "content": "x"}),
    "presence_penalty": ("served", 1.5),
    "prompt_cache_key": ("ignored", "k"),
    "prompt_cache_options": ("ignored", {"mode": "explicit"}),
    "prompt_cache_retention": ("ignored", "24h"),
    "reasoning_effort": ("served", "low"),
    "response_format": ("served", {"type": "json_object"}),
    "safety_identifier": ("ignored", "x"),
    "seed": ("served", 7),
    "service_tier": ("ignored", "flex"),
    "stop": ("served", ["x"]),
    "store": ("ignored", True),
    "stream": ("served", True),
    "stream_options": ("ignored", {"include_usage": True}),
    "temperature": ("served", 0.5),
    "tool_choice": ("served", "required"),
    "tools": ("served", [{"type": "function", "function": {"name": "g"}}]),
    "top_logprobs": ("served", 3),
    "top_p": ("served", 0.5),
    "user": ("ignored", "x"),
    "verbosity": ("refused", "low"),
    "web_search_options": ("refused", {}),
}


# What a parameter needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "parallel_tool_calls": {"tools": CHATS["tools"][1]},
    "tool_choice": {"tools": CHATS["tools"][1]},
    "top_logprobs": {"logprobs": True},
}
