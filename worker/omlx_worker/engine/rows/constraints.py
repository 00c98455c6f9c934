"""Compiles what a text must match: constraints to grammars of llguidance over a model's tokens.

Grammars are compiled in threads that prepare rows, never in the one that decodes. Each that could
be hostile is first tried in a process of its own; see `omlx_worker.engine.rows.dry_run`.

Nothing is relaxed: a schema with a keyword that llguidance does not enforce is refused.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.client.compiling import JSON_FORM, grammar_of_schema, plain_reason
from omlx_producer.client.formats import exact_schema
from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.rows.lark import literally, numbered
from omlx_worker.engine.rows.vocabulary import named_tokens, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMARS = 128
"""Compiled grammars that are kept; the least recently used go."""

HARMLESS_CHOICES = 10_000
"""Characters of choices up to which they are compiled without a dry run."""

MOST_SECONDS = 2
"""CPU time that the dry run of one grammar may take."""

PATIENCE_SECONDS = 300.0
"""Wall time that it may take: a busy machine has little CPU time for it."""

TOO_SLOW = "the constraint takes too long to follow", "make it less ambiguous"
"""Ends a row whose grammar exceeds its budget of time, and refuses the grammar from then on."""

TOO_BUSY = (
    "the worker's machine was too busy to compile the constraint in "
    f"{PATIENCE_SECONDS:.0f} seconds; submit the job again"
)

_DRY_RUN = Path(__file__).with_name("dry_run.py")

_TOKEN, _SOME_TOKEN = re.compile(r"<\[[^]<>]*\]>"), "<[256]>"
"""Tokens by their ids, and one of the dry run's vocabulary that is not a byte."""


class BadConstraint(ValueError):
    """A constraint that cannot be compiled. The message is the reason, without a full stop.

    Attributes:
        rule: the rule of a grammar whose schema is to blame; "" if none is known.
    """

    def __init__(self, reason: str, rule: str = "") -> None:
        super().__init__(reason)
        self.rule = rule


class TooSlow(BadConstraint):
    """A constraint that took too long to follow when a text was held to it."""


@dataclass(slots=True, eq=False)
class Grammar:
    """A compiled constraint, shared by all rows that have it.

    Attributes:
        start: at the beginning of a text; copied for every row.
        vocabulary: tokens that its masks cover, at least the entries of the model's logits.
        ends: end tokens, allowed where a text may end.
        too_slow: whether it has taken too long to follow. Then no more rows may have it.
    """

    start: LLMatcher = field(repr=False)
    vocabulary: int
    ends: frozenset[int]
    too_slow: bool = False


class _Entry:
    """A grammar that is compiled once, or the reason why it cannot be."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.made: Grammar | BadConstraint | None = None


class Grammars:
    """Compiles constraints for one model, different ones at the same time. Any thread may call it.

    Args:
        vocabulary: entries of the model's logits. Those past the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._entries = lru_cache(MOST_GRAMMARS)(lambda _: _Entry())

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            BadConstraint: if it cannot be compiled, or only with too much CPU time.
            TooSlow: if it took too long to follow before.
            TimeoutError: if the machine was too busy to compile it.
        """
        with self._lock:
            entry = self._entries(constraint)
        with entry.lock:
            made = entry.made = entry.made or self._compiled(constraint)
        if isinstance(made, BadConstraint):
            raise BadConstraint(str(made), made.rule)
        if made.too_slow:
            raise TooSlow("it takes too long to follow")
        return made

    def spelled(self, text: str) -> list[int]:
        """The tokens of a text in an answer, as if a grammar left no other.

        Raises:
            BadConstraint: if the model's tokens cannot be constrained.
        """
        with self._lock:
            tokens = self.tokens
        return list(tokens.tokenize_str(text))

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The model's tokens as llguidance wants them; takes a second for a large vocabulary."""
        try:
            # Some tokenizers know tokens that their model does not.
            size = max(self._vocabulary, len(self._tokenizer))
            return tokens_of(self._tokenizer._tokenizer, size, self._tokenizer.eos_token_ids)
        except ImportError:
            raise BadConstraint("the worker has no llguidance; install it there") from None
        except ValueError as error:
            raise BadConstraint(f"the model's tokenizer cannot be constrained: {error}") from None

    def _compiled(self, constraint: Constraint) -> Grammar | BadConstraint:
        """The grammar of a constraint, or why there is none, which is kept as well."""
        try:
            with self._lock:
                tokens = self.tokens
            text = self._text_of(constraint)
            if not _is_harmless(constraint):
                _dry_run(constraint, _TOKEN.sub(_SOME_TOKEN, text))
        except BadConstraint as error:
            return BadConstraint(str(error), error.rule)  # without the frames of this one
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        start = LLMatcher(tokens, text, log_level=0, limits=limits)
        start.compute_bitmask()
        if start.is_error():
            return BadConstraint(plain_reason(start.get_error()))
        if warnings := start.get_grammar_warnings():
            return BadConstraint(plain_reason(warnings[0]))
        return Grammar(start, tokens.vocab_size, frozenset(tokens.eos_tokens))

    def _text_of(self, constraint: Constraint) -> str:
        """A constraint in llguidance's own form."""
        text = _text_of_answer(constraint, named_tokens(self._tokenizer._tokenizer))
        if not constraint.frame:
            return text
        [answer] = json.loads(text)["grammars"]
        return _joined({"lark_grammar": constraint.frame}, {**answer, "name": "answer"})


def _text_of_answer(constraint: Constraint, names: Mapping[str, int]) -> str:
    """The same, of what `Constraint.frame` has around it."""
    from llguidance import LLMatcher

    value = constraint.value
    match constraint.kind:
        case "grammar":
            return _joined({"lark_grammar": numbered(value, names)})
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(literally, json.loads(value))))
        case "json_object":
            value = '{"type": "object"}'
    try:
        return grammar_of_schema(value)
    except ValueError as error:
        raise BadConstraint(plain_reason(str(error))) from None


def _joined(*grammars: dict[str, str]) -> str:
    """Grammars in llguidance's own form."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _is_harmless(constraint: Constraint) -> bool:
    """Whether it compiles in no time whoever wrote it, so that no dry run is needed."""
    if constraint.kind == "choice":
        return len(constraint.value) <= HARMLESS_CHOICES
    return constraint.kind == "json_object"


def _dry_run(constraint: Constraint, text: str) -> None:
    """Compile a grammar in another process.

    Raises:
        BadConstraint: if it cannot be compiled, takes too much CPU time, or ends the process.
        TimeoutError: if the process had too little CPU time for `PATIENCE_SECONDS`.
    """
    asked: dict[str, Any] = {"grammar": text, "seconds": MOST_SECONDS, "options": JSON_FORM}
    if constraint.kind == "json_schema":
        asked["schema"] = exact_schema(json.loads(constraint.value))
    with subprocess.Popen(
        [sys.executable, "-P", _DRY_RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(json.dumps(asked), timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(TOO_BUSY) from None
    (error, rule), *paths = map(json.loads, said.splitlines() or ['["", ""]'])
    if error:
        where = ".".join(["schema", *paths[0]]) + ": " if paths else ""
        raise BadConstraint(where + plain_reason(error), rule)
    if process.returncode == -signal.SIGXCPU:
        raise BadConstraint(
            f"it takes more than {MOST_SECONDS} seconds of CPU time to compile; make it simpler"
        )
    if process.returncode < 0:
        raise BadConstraint("it is nested too deeply to compile; make it simpler")
    if process.returncode:
        raise BadConstraint(f"it cannot be tried: Python ended with {process.returncode}")
