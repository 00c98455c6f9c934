"""How families of models write their thinking and their answers: one table, by their tokens.

A form is told by the tokens of the vocabulary and by the markers in the chat template, never by a
model's name. Whether a prompt has opened the thinking is read from the prompt; see `Form.begun`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import Markup
from omlx_producer.wire.markup import Part, Splitter
from omlx_worker.engine.rows.lark import Spelling, literally, quoted
from omlx_worker.engine.rows.tools.syntax import Syntax, syntax_of

Edges = dict[Part, dict[str, Part]]

_TOKENS = re.compile(r"<\|\w+\|>")
_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Form:
    """Thinking between two markers, then the answer, between two more or not.

    Attributes:
        spelling: of the model's tokens.
        start, end: of the thinking; "" for a form without. Without a start the answer begins with
            thinking.
        opens, closes: what may stand before and after the answer.
        inside: tokens that the thinking may hold.
        by_token: which of the markers tokens write.
    """

    spelling: Spelling
    start: str = ""
    end: str = ""
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    by_token: frozenset[str] = frozenset()

    @property
    def thinks(self) -> bool:
        """Whether it marks its thinking."""
        return bool(self.end)

    @property
    def close(self) -> str:
        """What ends the thinking at its budget, and may begin the answer."""
        return self.end

    @property
    def close_for_calls(self) -> str:
        """The same where a call of a tool may follow in place of the answer."""
        return self.close

    @property
    def answer(self) -> str:
        """What an answer must begin with."""
        return ""

    def edges(self) -> Edges:
        """The markers that end each part, without those of calls."""
        after_thinking = [self.end, *(each for each in self.opens if each in self.by_token)]
        again = [self.end] if self.end in self.by_token else []
        stripped: dict[str, Part] = dict.fromkeys([*again, *self.opens, *self.closes], "content")
        edges: Edges = {
            "reasoning": dict.fromkeys(filter(None, after_thinking), "content"),
            "content": stripped | ({self.start: "reasoning"} if self.start else {}),
        }
        return {part: markers for part, markers in edges.items() if markers}

    @property
    def kept(self) -> dict[str, int]:
        """What of markers belongs to what follows; see `Markup.kept`."""
        return {}

    @property
    def early(self) -> tuple[str, ...]:
        """What begins the thinking or the answer, where no token does; see `Markup.early`."""
        begin = {self.start, *self.opens} - self.by_token
        return tuple(each for each in self.edges().get("content", ()) if each in begin)

    @property
    def headers(self) -> dict[str, Part]:
        """The words of headers that choose a part; see `Markup.headers`."""
        return {}

    def begun(self, markup: Markup, tail: str) -> Part:
        """The part in which the text begins.

        Args:
            tail: what the template has written of the answer.
        """
        if not self.start and self.end and self.end not in tail:
            return "reasoning"
        splitter = Splitter(markup)
        for _ in splitter.feed(tail, range(len(tail))):
            pass
        return splitter.part

    def may_think(self, tail: str) -> bool:
        """Whether thinking may follow where the prompt has opened none: nothing closes it there."""
        return bool(self.start) and not any(each in tail for each in (self.end, *self.opens))

    @property
    def header(self) -> str:
        """What an answer that is no call must begin with, as a grammar has it; "" for nothing."""
        return self.spelling.literal(self.answer)

    def frame(self, first: Part, tail: str, header: str, *, talks: bool) -> str:  # noqa: ARG002 - on channels
        """The grammar of ``@answer`` with thinking and what else may stand around it.

        It is in Lark's notation, and "" if nothing may.

        Args:
            first: the part in which the text begins.
            tail: what the template has written of the answer.
            header: of the answer, from `header`; "" if its own grammar has it.
            talks: whether the model may tell the user something before it.
        """
        thought = f"{self._thought()} GAP?"
        before = ""
        if first == "reasoning":
            before = thought
        elif self.may_think(tail):
            before = f"(GAP? {self.spelling.literal(self.start)} {thought})?"
        opens = [] if any(each in tail for each in self.opens) else self.opens
        begun = f"({self._either(opens)} GAP?)?" if opens else ""
        closed = f"((GAP? {self._either(self.closes)})+ GAP?)?" if self.closes else ""
        if not (before or begun or closed or header):
            return ""
        parts = filter(None, [before, begun, header, "@answer", closed])
        rules = {"start": " ".join(parts), "GAP": r"/\n{1,2}/"}
        if before:
            rules |= self._rules()
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _thought(self) -> str:
        first = self.spelling.first(self.end)
        return "thought" if first is None else f"thought {self.spelling.literal(self.end[first:])}"

    def _rules(self) -> dict[str, str]:
        """The rule of the text of thinking, with the beginning of its end that no token writes."""
        first = self.spelling.first(self.end)
        if first is None:
            return {f"thought[suffix={quoted(self.end)}]": _TEXT}
        if first:
            return {"thought": f"/(?s:.*){literally(self.end[:first])}/"}
        held = [each for each in self.inside if self.spelling.first(each) == 0]
        if not held:
            return {"thought": "TEXT", "TEXT": _TEXT}
        return {"thought": f"(TEXT | {self._either(held)})*", "TEXT": "/(?s:.+)/"}

    def _either(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self.spelling.literal, texts))})"

    @property
    def told(self) -> str:
        """In words, for users."""
        if not self.thinks:
            return "all of the text, without thinking"
        begins = f"from {self.start} " if self.start else ""
        wrapped = f" or after {' or '.join(self.opens)}" if self.opens else ""
        return f"thinking {begins}to {self.end}, answers after it{wrapped}"

    @property
    def told_of_calls(self) -> str:
        """What tells a call, in words; "" if that is its marker."""
        return ""


@dataclass(frozen=True, slots=True)
class Channels(Form):
    """OpenAI's harmony: messages with headers, on channels. Calls have a recipient."""

    start: str = "<|channel|>analysis<|message|>"
    end: str = "<|end|>"

    @property
    def close(self) -> str:
        return self.close_for_calls + self.answer

    @property
    def close_for_calls(self) -> str:
        return "<|end|><|start|>assistant"

    @property
    def answer(self) -> str:
        return "<|channel|>final<|message|>"

    def edges(self) -> Edges:
        ends: dict[str, Part] = dict.fromkeys(("<|end|>", "<|start|>", "<|channel|>"), "nothing")
        return {
            "reasoning": ends,
            "content": ends,
            "call": ends,
            "nothing": {"<|message|>": "content"},
        }

    @property
    def kept(self) -> dict[str, int]:
        return {marker: len(marker) for marker in ("<|start|>", "<|channel|>")}

    @property
    def headers(self) -> dict[str, Part]:
        # The recipient tells a call, whatever its channel.
        return {"to=": "call", "<|channel|>analysis": "reasoning"}

    def may_think(self, tail: str) -> bool:
        return "<|message|>" not in tail

    @property
    def header(self) -> str:
        channel, kind, message = map(
            self.spelling.literal, ("<|channel|>", "<|constrain|>", "<|message|>")
        )
        return f'{channel} "final" (" "? {kind} "json")? {message}'

    def frame(self, first: Part, tail: str, header: str, *, talks: bool) -> str:
        if first != "reasoning" and not self.may_think(tail):
            return ""
        channel, message = map(self.spelling.literal, ("<|channel|>", "<|message|>"))
        again = self.spelling.literal("<|end|><|start|>assistant")
        said = '("analysis" | "commentary")' if talks else '"analysis"'
        begun = f"TEXT {again}" if first == "reasoning" else ""
        rules = {
            "start": " ".join(filter(None, [begun, "said*", header, "@answer"])),
            "said": f"{channel} {said} {message} TEXT {again}",
            "TEXT": _TEXT,
        }
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    @property
    def told(self) -> str:
        return "thinking on <|channel|>analysis, answers on final and commentary"

    @property
    def told_of_calls(self) -> str:
        return "calls of tools by their recipient"


_PAIRS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<thought>", "</thought>"),
    ("<think>", "</think>"),
    ("Here is my thought process:", "Here is my response:"),
)
"""Markers of thinking that mlx-lm does not know, or only as tokens. The first pair counts."""

_WRAPPERS = (
    ("<answer>", "</answer>"),
    ("<response>", "</response>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|begin_of_box|>", "<|end_of_box|>"),
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ("", "<|close|>message<|sep|>"),
)
_FINAL = "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"
_REFLECT = "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"
_HARMONY = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"})


def form_of(tokenizer: TokenizerWrapper) -> Form:
    """The form of a model's answers. One that is not known marks nothing: all is content."""
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    spelling = Spelling(tokenizer.get_added_vocab())
    if vocabulary.keys() >= _HARMONY:
        return Channels(spelling)

    def known(marker: str) -> bool:
        tokens = _TOKENS.findall(marker)
        return marker in template or all(each in vocabulary for each in tokens or [marker])

    form = Form(spelling)
    if tokenizer.has_thinking:
        form = Form(spelling, tokenizer.think_start, tokenizer.think_end)
    elif _FINAL[0] in template:
        form = Form(spelling, "", _FINAL[0], closes=(_FINAL[1],))
    elif pair := next((pair for pair in _PAIRS if all(map(known, pair))), None):
        form = Form(spelling, *pair)
    if not form.thinks:
        return form
    wrappers = [pair for pair in _WRAPPERS if all(map(known, filter(None, pair)))]
    form = replace(
        form,
        opens=tuple(start for start, _ in wrappers if start),
        closes=(*form.closes, *(end for _, end in wrappers)),
        inside=_REFLECT if all(map(known, _REFLECT)) else (),
    )
    markers = (form.start, form.end, *form.opens, *form.closes)
    return replace(form, by_token=frozenset(filter(spelling.token, markers)))


def told_of(tokenizer: TokenizerWrapper) -> str:
    """How the answers of a model are read, in words."""
    form, syntax = form_of(tokenizer), syntax_of(tokenizer)
    begins = "a brace" if syntax.bare else syntax.start
    calls = f"calls of tools begin with {begins}"
    return f"{form.told}; {form.told_of_calls or calls}"


def markup_of(
    form: Form,
    syntax: Syntax | None,
    functions: Iterable[str],
    tail: str,
    *,
    held: bool,
) -> tuple[Markup, dict[int, str]]:
    """How an answer's text is marked, and the texts of the tokens that write its markers.

    Args:
        syntax: how calls are written; None for a request without tools.
        functions: their names.
        tail: what the template has written of the answer.
        held: whether calls are held to a grammar, which has none within thinking.
    """
    edges = {part: dict(markers) for part, markers in form.edges().items()}
    kept = form.kept
    if syntax and not syntax.bare and "call" not in edges:
        edges.setdefault("content", {})[syntax.start] = "call"
        if syntax.end:
            edges["call"] = {syntax.end: "content"}
        # Some models call before their thinking ends. Prose may name the marker alone.
        may_call = "reasoning" in edges and not held
        for begun in _beginnings(syntax, functions) if may_call else ():
            edges["reasoning"][syntax.start + begun] = "call"
            kept[syntax.start + begun] = len(begun)
    by_token, tokens = dict[str, int](), dict[int, str]()
    for marker in {marker for markers in edges.values() for marker in markers}:
        if found := form.spelling.token(marker):
            by_token[marker], token, tokens[token] = found
    bare = syntax is not None and syntax.bare
    # Without tools nobody waits for a call.
    headers: dict[str, Part] = {
        word: "reasoning" if to == "call" and syntax is None else to
        for word, to in form.headers.items()
    }
    markup = Markup(edges=edges, headers=headers, kept=kept, by_token=by_token, bare=bare)
    first = form.begun(markup.without_calls(), tail)
    return markup.model_copy(update={"first": first, "early": form.early}), tokens


def _beginnings(syntax: Syntax, functions: Iterable[str]) -> Sequence[str]:
    """What follows the marker of a call, up to the function's name or a little further."""
    head, named, after = syntax.before.partition("{name}")
    if not named:
        return []
    head = (syntax.section or ("",))[0] + head
    if head.strip():
        return [head]
    # Arguments, or the end of the call, follow a name that is not prose.
    return [f"{head}{name}{end}" for name in functions for end in ([after] if after else "\n<")]
