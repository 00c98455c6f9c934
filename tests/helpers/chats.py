"""Tokenizers of families that call tools: a token a byte, and the markers that they have."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from llguidance import LLTokenizer
from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from omlx_worker.delivery.response import message_of
from omlx_worker.engine.loading.tokenizer import read_tokenizer
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.text import RowText, decode_faithfully
from omlx_worker.engine.rows.tools.syntax import Syntax, syntax_of
from omlx_worker.engine.rows.vocabulary import tokens_of
from tests.helpers.checkpoints import write_tokenizer

ADDED = {
    "json_tools": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm47": [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "<|observation|>",
    ],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "minicpm5": [],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>"],
    "harmony": [
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"),
        "<|end|>",
    ],
    "dsml": ["｜DSML｜"],
    "deepseek_r1": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ],
    "seed": ["<seed:tool_call>", "</seed:tool_call>"],
    "command": ["<|START_ACTION|>", "<|END_ACTION|>"],
    "nemotron": [],
    "mistral_list": ["[TOOL_CALLS]"],
    "": [],
}
"""The markers of each of mlx-lm's parsers, and of families that it has none for."""

ADDED["deepseek_v31"] = ADDED["deepseek_r1"]
_IN_TEMPLATES = {
    "deepseek_r1": "{# ```json #}",
    "nemotron": "{# <TOOLCALL> #}",
    # An answer goes on in a header that the prompt begins.
    "harmony": "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}
_PARSERS = {each.name: each.name for each in iter_modules(tool_parsers.__path__)}
_PARSERS["mistral_list"] = "mistral"

PAIRED = ["qwen3_coder", "glm47", "minimax_m2", "minicpm5", "seed"]
"""Those whose calls hold pairs of texts, and which a parser of mlx-lm reads."""

THINKING = ["<think>", "</think>"]

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% if reasoning_effort %}effort: {{ reasoning_effort }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}]"
    "{% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OPENING = (
    "{% if add_generation_prompt and thinks %}<think>\n"
    "{% if enable_thinking is false %}</think>\n{% endif %}{% endif %}"
)
"""Follows it where a model has markers of thinking."""


@functools.cache
def tokenizer_of(
    family: str, *, thinking: bool = False, marks: bool = True, template: str | None = None
) -> TokenizerWrapper:
    """A tokenizer of a family.

    Args:
        thinking: whether it has markers of thinking.
        marks: whether the markers of calls are tokens.
    """
    added = ADDED[family] * marks + (THINKING if thinking else [])
    return tokenizer_with(added, template or TEMPLATE + OPENING * thinking, family)


def tokenizer_with(added: Collection[str], template: str, family: str = "") -> TokenizerWrapper:
    """A tokenizer of a token a byte and these added ones.

    Args:
        family: of the parser of mlx-lm that reads its calls; "" for none.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_tokenizer(path)
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
        tokenizer.save(str(path / "tokenizer.json"))
        file = path / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(file.read_text())
        config["chat_template"] = template + _IN_TEMPLATES.get(family, "")
        if family in _PARSERS:
            config["tool_parser_type"] = _PARSERS[family]
        file.write_text(json.dumps(config))
        return read_tokenizer(path, {})


def vocabulary(tokenizer: TokenizerWrapper) -> LLTokenizer:
    """Its tokens as constraints have them, without llguidance's tables for large vocabularies."""
    return tokens_of(tokenizer._tokenizer, len(tokenizer), tokenizer.eos_token_ids, slices=[])


def syntax(family: str) -> Syntax:
    return syntax_of(tokenizer_of(family))


Call = tuple[str, dict[str, Any]]


def pieces_of(syntax: Syntax, *calls: Call) -> list[tuple[str, bool]]:
    """Calls as a model of the family writes them: texts, and whether each is of the syntax."""
    before, between, after = syntax.section or ("", syntax.end + syntax.between + syntax.start, "")
    pieces = [(syntax.start + before, True)]
    for index, (name, arguments) in enumerate(calls):
        pieces += [(between, True)] if index else []
        pieces += _call(syntax, name, arguments)
    return [*pieces, (after + syntax.end, True)]


def _call(syntax: Syntax, name: str, arguments: dict[str, Any]) -> list[tuple[str, bool]]:
    pairs = syntax.pairs

    def value(given: Any) -> str:
        if pairs and pairs.raw and isinstance(given, str):
            return given
        return json.dumps(given, ensure_ascii=False)

    inner: list[tuple[str, bool]] = []
    if pairs is None:
        inner.append((value(arguments), False))
    else:
        for key, given in arguments.items():
            string = json.dumps(isinstance(given, str))
            before = pairs.before.replace("{key}", key).replace("{string}", string)
            inner += [(pairs.between, True)] if inner else []
            inner += [(before, True), (value(given), False), (pairs.after, True)]
    return [(syntax.before.replace("{name}", name), True), *inner, (syntax.after, True)]


def written(syntax: Syntax, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of the family writes it."""
    return written_all(syntax, (name, arguments))


def written_all(syntax: Syntax, *calls: Call) -> str:
    return "".join(text for text, _ in pieces_of(syntax, *calls))


def spelled(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """The tokens of a text, none of them an added one."""
    return [
        token
        for character in text
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]


def answer_of(
    tokenizer: TokenizerWrapper, form: ReplyForm | None, tokens: list[int], *, cut: bool = False
) -> dict[str, Any]:
    """The message of a row with these tokens."""
    decode_faithfully(tokenizer)
    text = RowText(RowRequest("j:0", [1], len(tokens) + 1, Sampling(), reply=form), tokenizer)
    said = "".join(text.feed(token).text for token in tokens) + text.cut()
    return message_of(said, form, "j:0", marks=[mark.offset for mark in text.marks], cut=cut)
