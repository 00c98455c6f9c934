"""How the families of models write a call of a tool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as pairs of a key and a value.

    Attributes:
        before: each value; ``{key}`` stands for the key, ``{string}`` for true before a text and
            for false before JSON.
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

    @property
    def told(self) -> bool:
        """Whether each pair tells if its value is a text."""
        return "{string}" in self.before


@dataclass(frozen=True, slots=True)
class Syntax:
    """The text of a call.

    Attributes:
        before, after: around the arguments; ``{name}`` stands for the function's name. "" if
            nothing here can write a call.
        pairs: how arguments are written; None for one JSON object.
        between: two calls.
        repeats: whether a text can have several calls.
        start, end: the model's markers around all this; "" for none.
        section: what comes before, between and after calls if one start and end hold several.
        header: a regular expression of what models write for ``before``, where that varies.
        parser: the module of mlx-lm's ``tool_parsers`` that reads calls written otherwise; "" for
            none.
        stops: tokens that end an answer, whatever the checkpoint says.
        goes_on: tokens that end no answer, whatever the checkpoint says.
        has_recipient: whether a header has the function's name, in the role or on either channel.
    """

    before: str
    after: str
    pairs: Pairs | None = None
    between: str = "\n"
    repeats: bool = True
    start: str = ""
    end: str = ""
    section: tuple[str, str, str] | None = None
    header: str = ""
    parser: str = ""
    stops: tuple[str, ...] = ()
    goes_on: tuple[str, ...] = ()
    has_recipient: bool = False

    @property
    def bare(self) -> bool:
        """Whether a call has no marker: it is a whole text that begins with a brace."""
        return not self.start

    @property
    def is_exact(self) -> bool:
        """Whether what the grammar takes can be read back without loss."""
        return bool(self.before) and (self.pairs is None or self.pairs.raw)


_LIST = "[", ", ", "]"
_WRITTEN = {
    "json_tools": Syntax('\n{"name": "{name}", "arguments": ', "}\n"),
    "kimi_k2": Syntax(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between="",
        # The calls of a chat are counted.
        header=r"<\|tool_call_begin\|>functions\.{name}:\d+<\|tool_call_argument_begin\|>",
    ),
    "mistral": Syntax(
        "{name}[ARGS]", "", between="", header=r"{name}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?"
    ),
    "qwen3_coder": Syntax(
        "\n<function={name}>\n",
        "</function>\n",
        Pairs("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "glm47": Syntax(
        "{name}",
        "",
        Pairs("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
        stops=("<|observation|>",),
    ),
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
    "gemma4": Syntax("", "", stops=("<|tool_response>",)),
}
"""How families write calls that mlx-lm knows and marks, by their parsers."""

_DSML = Syntax(
    '<｜DSML｜invoke name="{name}">\n',
    "</｜DSML｜invoke>\n",
    Pairs('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n"),
    start="<｜DSML｜function_calls>",
    end="</｜DSML｜function_calls>",
    section=("\n", "", ""),
)
_DEEPSEEK = Syntax(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    start="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    section=("", "", ""),
)
_OTHERS: dict[tuple[str, ...], Syntax] = {
    # gpt-oss. The recipient tells a call, in the role or after any channel.
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"): Syntax(
        "functions.{name} <|constrain|>json<|message|>",
        "",
        start="<|channel|>commentary to=",
        repeats=False,
        header=r"(?:{any}\bto=)?(?:functions\.)?{name}(?=[\s<]){any}<\|message\|>".replace(
            "{any}", r"(?:(?!<\|message\|>)(?s:.)){0,200}?"
        ),
        stops=("<|call|>", "<|return|>"),
        goes_on=("<|end|>",),
        has_recipient=True,
    ),
    # DeepSeek V4, and V3.2.
    ("｜DSML｜tool_calls",): replace(
        _DSML, start="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>"
    ),
    ("｜DSML｜",): _DSML,
    # DeepSeek R1 and V3, whose template writes a fence around arguments, and V3.1.
    ("<｜tool▁calls▁begin｜>", "```json"): replace(
        _DEEPSEEK,
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        section=("", "\n", ""),
    ),
    ("<｜tool▁calls▁begin｜>",): _DEEPSEEK,
    # Seed-OSS.
    ("<seed:tool_call>",): Syntax(
        "\n<function={name}>\n",
        "</function>\n",
        Pairs("<parameter={key}>", "</parameter>\n"),
        start="<seed:tool_call>",
        end="</seed:tool_call>",
        parser="qwen3_coder",
    ),
    # Command R7B and A.
    ("<|START_ACTION|>",): Syntax(
        '{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
        "}",
        start="<|START_ACTION|>",
        end="<|END_ACTION|>",
        section=_LIST,
    ),
    # Nemotron Super v1.5 and Nano v2.
    ("<TOOLCALL>",): Syntax(
        '{"name": "{name}", "arguments": ',
        "}",
        start="<TOOLCALL>",
        end="</TOOLCALL>",
        section=_LIST,
    ),
}
"""How other families write calls, by texts that are tokens of theirs or in their templates."""


def syntax_of(tokenizer: TokenizerWrapper) -> Syntax:
    """How a model marks its calls, and writes them if that is known here.

    A model without known marks writes bare JSON objects, in Llama 3's names if its template has
    those.
    """
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template)
    if tokenizer.tool_parser is not None:
        family = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
        syntax = _WRITTEN.get(family, Syntax("", ""))
        if family == "mistral" and "[ARGS]" not in vocabulary:
            listed = '{"name": "{name}", "arguments": '
            syntax = replace(syntax, before=listed, after="}", section=_LIST)
        # Mistral's parser takes the id of a call for its name.
        parser = "" if family == "mistral" else family
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        return replace(syntax, start=start, end=end, parser=parser)
    for marks, syntax in _OTHERS.items():
        if all(mark in vocabulary or mark in template for mark in marks):
            return syntax
    arguments = "parameters" if '"parameters": ' in template else "arguments"
    return Syntax(f'{{"name": "{{name}}", "{arguments}": ', "}", repeats=False)


def ends_of(tokenizer: TokenizerWrapper) -> set[int]:
    """The tokens that end an answer: a checkpoint's own, corrected by its syntax of calls.

    A model that does not stop after a call makes up its result.
    """
    vocabulary, syntax = tokenizer.get_vocab(), syntax_of(tokenizer)
    stops = {vocabulary[text] for text in syntax.stops if text in vocabulary}
    return stops | set(tokenizer.eos_token_ids) - {vocabulary.get(text) for text in syntax.goes_on}
