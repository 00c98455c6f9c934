"""Compiles what a text must match: constraints to grammars of llguidance over a model's tokens.

Grammars are compiled in the thread that prepares rows, never in the one that decodes. Each is first
compiled in a process of its own, because llguidance has no limit on time, and a hostile grammar
overflows its stack, which ends the process (seen with 1.9.1: chains of 5,000 references).

Nothing is relaxed: a schema with a keyword that llguidance does not enforce is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MOST_GRAMMARS = 128
"""Compiled grammars that are kept; the least recently used go."""

MOST_SECONDS = 2.0
"""What compiling one grammar may take."""

_MOST_PARTS = 200
"""Parts of a refused schema that are looked at for the reason."""

_SCHEMA_OPTIONS: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written as `json.dumps` writes it, so most of what is between values is forced."""

_TRY = """
import sys
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0).compute_bitmask()
"""


_PLAINLY = {
    "NoExtension": "no text can match it",
    "oneOf constraints": "oneOf is taken only of schemas that exclude each other; give anyOf",
    "Expecting object schema": "it is no JSON object; give one",
}
"""What llguidance says, and what users need to know."""


class BadConstraint(ValueError):
    """A constraint that cannot be compiled. The message is the reason, without a full stop."""


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled constraint, shared by all rows that have it.

    Attributes:
        start: at the beginning of a text; copied for every row.
        vocabulary: tokens that its masks tell of, at least the entries of the model's logits.
        ends: end tokens, allowed where a text may end.
    """

    constraint: Constraint
    start: LLMatcher = field(repr=False)
    vocabulary: int
    ends: frozenset[int]


class Grammars:
    """Compiles constraints for one model. Safe to call from any one thread at a time.

    Args:
        vocabulary: entries of the model's logits. Those past the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._kept = lru_cache(MOST_GRAMMARS)(self._compiled)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            BadConstraint: if it cannot be compiled, or not in `MOST_SECONDS`.
        """
        kept = self._kept(constraint)
        if isinstance(kept, str):
            raise BadConstraint(kept)
        return kept

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The model's tokens as llguidance wants them; takes a second for a large vocabulary."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise BadConstraint("the worker has no llguidance; install it there") from None
        try:
            tokenizer = self._tokenizer._tokenizer
            return from_tokenizer(
                tokenizer,
                # Some tokenizers know tokens that their model does not.
                n_vocab=max(self._vocabulary, len(tokenizer)),
                eos_token=sorted(self._tokenizer.eos_token_ids),
            )
        except ValueError as error:
            raise BadConstraint(f"the model's tokenizer cannot be constrained: {error}") from None

    def _compiled(self, constraint: Constraint) -> Grammar | str:
        """The grammar of a constraint, or why there is none, which is kept as well."""
        try:
            text = self._text_of(constraint)
            _try_apart(text)
        except BadConstraint as error:
            return str(error)
        start = _matcher(self.tokens, text)
        start.compute_bitmask()
        if start.is_error():
            reason = _reason(start.get_error())
            where = (
                self._where(json.loads(constraint.value), reason)
                if constraint.kind == "json_schema"
                else ""
            )
            return where + reason
        if warnings := start.get_grammar_warnings():
            return _reason(warnings[0])
        tokens = self.tokens
        return Grammar(constraint, start, tokens.vocab_size, frozenset(tokens.eos_tokens))

    def _text_of(self, constraint: Constraint) -> str:
        """A constraint in llguidance's own form."""
        text = _text_of(constraint)
        if not constraint.begin_after:
            return text
        before, after = _lead(constraint, self.tokens)
        form = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
        [answer] = form["grammars"]
        lead = {"lark_grammar": f"start: before {after} @answer\n{before}"}
        return json.dumps({"grammars": [lead, {**answer, "name": "answer"}]})

    def _where(self, schema: Any, reason: str) -> str:
        """The innermost part of a schema that is refused for this reason, as a path and a colon."""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        path, part, left = ["schema"], schema, _MOST_PARTS
        while True:
            for step, inner in _parts(part):
                left -= 1
                if left < 0:
                    break
                alone = Constraint("json_schema", json.dumps({**shared, **inner}))
                if reason in _matcher(self.tokens, _text_of(alone)).get_error():
                    path, part = [*path, *step], inner
                    break
            else:
                return ".".join(path) + ": "
            if left < 0:
                return ".".join(path) + ": "


def _text_of(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    value = constraint.value
    match constraint.kind:
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_literally, json.loads(value))))
        case "json_object":
            value = '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(value, overrides=_SCHEMA_OPTIONS)
    except ValueError as error:
        raise BadConstraint(_reason(str(error))) from None


def _literally(text: str) -> str:
    """A regular expression of exactly this text. Rust's syntax takes Python's escapes not all."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _lead(constraint: Constraint, tokens: LLTokenizer) -> tuple[str, str]:
    """The rule of the text up to the marker, and what follows it before the answer begins."""
    marker = constraint.begin_after
    ids = tokens.tokenize_str(marker, parse_special=True)
    gap = "/[ \\n]*/" if constraint.kind in ("json_object", "json_schema") else ""
    if len(ids) == 1 and tokens.is_special_token(ids[0]):
        return "before: /(?s:.*)/", f"<[{ids[0]}]> {gap}"
    return f"before[suffix={json.dumps(marker)}]: /(?s:.*)/", gap


def _matcher(tokens: LLTokenizer, text: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokens, text, log_level=0, limits=_limits())


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _try_apart(text: str) -> None:
    """Compile a grammar in another process, over bytes instead of tokens.

    Raises:
        BadConstraint: if that takes too long or ends the process.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", _TRY],
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BadConstraint(
            f"it takes more than {MOST_SECONDS:g} seconds to compile; make it simpler"
        ) from None
    if tried.returncode < 0:
        raise BadConstraint("it is nested too deeply to compile; make it simpler")
    if tried.returncode:
        raise BadConstraint(f"it cannot be tried: Python ended with {tried.returncode}")


def _parts(part: Any) -> Iterable[tuple[Sequence[str], dict[str, Any]]]:
    """The schemas directly inside a part of a schema, and the steps to them."""
    for name, inner in part.items():
        if isinstance(inner, dict):
            nested = [([name, key], value) for key, value in inner.items()]
            yield from (entry for entry in [([name], inner), *nested] if isinstance(entry[1], dict))
        elif isinstance(inner, list):
            for index, value in enumerate(inner):
                if isinstance(value, dict):
                    yield [name, str(index)], value


def _reason(error: str) -> str:
    """The part of llguidance's message that says why, on one line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    chosen = chosen.removeprefix("error:").strip()
    for start, plain in _PLAINLY.items():
        if chosen.startswith(start):
            return plain
    return chosen if len(chosen) <= 200 else f"{chosen[:200]}..."
