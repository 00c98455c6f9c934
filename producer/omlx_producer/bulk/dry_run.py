"""Looks at an input as a run would, and runs none of its rows: counts them, or says whether any is
left to run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omlx_producer.bulk.input import Client, Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.output import real_path, require_run_output
from omlx_producer.bulk.progress import say_skipped
from omlx_producer.bulk.row import TOKEN_CHARACTERS, BadRow, Row
from omlx_producer.bulk.store import Store, run_path
from omlx_producer.terminal import write
from omlx_producer.wire import ModelInfo


@dataclass
class Findings:
    """What an input holds.

    Attributes:
        exact: whether ``prompt_tokens`` was counted, not estimated.
        ignored: rows by field of OpenAI that has no effect.
        most_completion_tokens: the limit of all rows together.
    """

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    exact: bool = True
    most_completion_tokens: int = 0
    ignored: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bad": dict(self.bad),
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_exact": self.exact,
            "most_completion_tokens": self.most_completion_tokens,
            "ignored_fields": dict(self.ignored),
        }


class TokenCounter:
    """Counts with the model's tokenizer if the worker runs a folder that is on this machine too.

    Else, or without `tokenizers`, it estimates from the characters. Chat templates are not counted.

    Attributes:
        exact: whether everything so far was counted.
    """

    def __init__(self, models: Mapping[str, ModelInfo]) -> None:
        self.exact = True
        self._models = models
        self._lengths: dict[str, Callable[[str], int] | None] = {}

    def count(self, row: Row) -> int:
        """Tokens of a row's prompt."""
        request = row.request
        tokens = [len(text) for text in request.texts if isinstance(text, list)]
        if tokens:
            return sum(tokens)
        if request.model not in self._lengths:
            self._lengths[request.model] = self._load(request.model)
        length = self._lengths[request.model]
        if length is None:
            self.exact = False
            return -(-row.characters // TOKEN_CHARACTERS)
        if request.messages is not None:
            self.exact = False
        return length(request.prompt_text)

    def _load(self, alias: str) -> Callable[[str], int] | None:
        info = self._models.get(alias)
        path = Path(info.model, "tokenizer.json") if info else None
        if path is None or not path.is_file():
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None
        tokenizer = Tokenizer.from_file(str(path))
        return lambda text: len(tokenizer.encode(text).ids)


def look_through(options: RunOptions, models: Mapping[str, ModelInfo]) -> Findings:
    """Check every row as a run would, and run none. Bad rows are reported on stderr.

    Raises:
        InvalidRequest: if the input cannot be read.
    """
    findings, counter = Findings(), TokenCounter(models)
    with Input.open(options, models) as source:
        for row in source.all_rows():
            findings.rows += 1
            if isinstance(row, BadRow):
                findings.bad[row.code] += 1
                write(row.reason + "\n", err=True)
                continue
            findings.prompt_tokens += counter.count(row)
            findings.most_completion_tokens += row.most_tokens
        findings.exact, findings.ignored = counter.exact, source.maker.ignored
        say_skipped(source.maker.skipped)
    return findings


def has_rows_left(
    client: Client,
    options: RunOptions,
    output: Path | None = None,
    *,
    replace_results: bool = False,
) -> bool:
    """Whether a run would run any row; True for stdin, of which it is not known. Writes nothing.

    Args:
        output: of an earlier run perhaps; see `omlx_producer.bulk.run.run_here`.

    Raises:
        InvalidRequest: if input or output cannot be used.
        OSError: if a file cannot be read.
    """
    models, earlier, known = client.models(), None, None
    if output is not None:
        path = real_path(output)
        require_run_output(path, options.input, keep=options.keep, vectors=options.embed)
        if earlier := RunOptions.of_run(path):
            known = run_path(path)
    if options.input == "-":
        return True
    options = options.with_default_model(models, earlier)
    with (
        Input.open(options, models) as source,
        contextlib.closing(Store(known)) as store,
    ):
        if earlier is not None and options.replaces(
            earlier, path, store.count("results"), replace_results
        ):
            return True
        return next(source.rows(store), None) is not None
