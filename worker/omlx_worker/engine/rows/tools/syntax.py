"""How the families of models write a call of a tool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as pairs of a key and a value.

    Attributes:
        before: each value; ``{key}`` stands for the key.
        after: each value.
        between: two pairs.
        raw: whether a text is written as it is, not as JSON.
        identifiers: whether names of functions and keys must be identifiers.
    """

    before: str
    after: str
    between: str = ""
    raw: bool = True
    identifiers: bool = False


@dataclass(frozen=True, slots=True)
class Syntax:
    """The text of a call.

    Attributes:
        before, after: around the arguments; ``{name}`` stands for the function's name.
        pairs: how arguments are written; None for one JSON object.
        between: two calls.
        repeats: whether a text can have several calls.
        start, end: the model's markers around all this; "" for none.
    """

    before: str
    after: str
    pairs: Pairs | None = None
    between: str = "\n"
    repeats: bool = True
    start: str = ""
    end: str = ""

    @property
    def bare(self) -> bool:
        """Whether a call has no marker: it is a whole text that begins with a brace."""
        return not self.start

    @property
    def is_exact(self) -> bool:
        """Whether what the grammar takes can be read back without loss."""
        return self.pairs.raw if self.pairs else not self.bare


_WRITTEN = {
    "json_tools": Syntax('\n{"name": "{name}", "arguments": ', "}\n"),
    "kimi_k2": Syntax(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between="",
    ),
    "mistral": Syntax("{name}[ARGS]", "", between=""),
    "qwen3_coder": Syntax(
        "\n<function={name}>\n",
        "</function>\n",
        Pairs("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "glm47": Syntax("{name}", "", Pairs("<arg_key>{key}</arg_key><arg_value>", "</arg_value>")),
    "minimax_m2": Syntax(
        '\n<invoke name="{name}">\n',
        "</invoke>\n",
        Pairs('<parameter name="{key}">', "</parameter>\n"),
    ),
    "minicpm5": Syntax('"{name}">', "", Pairs('<param name="{key}">', "</param>")),
    "pythonic": Syntax(
        "[{name}(",
        ")]",
        Pairs("{key}=", "", between=", ", raw=False, identifiers=True),
        between="",
    ),
}


def family_of(tokenizer: TokenizerWrapper) -> str | None:
    """The module of mlx-lm's ``tool_parsers`` that reads a model's calls; None without one."""
    parser = tokenizer.tool_parser
    return None if parser is None else str(parser.__module__).rpartition(".")[2]


def syntax_of(tokenizer: TokenizerWrapper) -> Syntax | None:
    """How a model writes calls; None if mlx-lm reads them, but nothing here can write them.

    A model whose calls mlx-lm cannot read writes bare JSON objects, in Llama 3's names if its
    template has those.
    """
    family = family_of(tokenizer)
    if family is None:
        llama = '"parameters": ' in str(tokenizer.chat_template)
        arguments = "parameters" if llama else "arguments"
        return Syntax(f'{{"name": "{{name}}", "{arguments}": ', "}", repeats=False)
    syntax = _WRITTEN.get(family)
    if syntax is None:
        return None
    if family == "mistral" and "[ARGS]" not in tokenizer.get_vocab():
        listed = '[{"name": "{name}", "arguments": '
        syntax = replace(syntax, before=listed, after="}]", repeats=False)
    return replace(syntax, start=tokenizer.tool_call_start, end=tokenizer.tool_call_end)
