"""Looks at an input as a run would, and runs none of its rows: counts them, or says whether any is
left to run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from omlx_producer.bulk.input import Client, Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.output import real_path, require_run_output
from omlx_producer.bulk.progress import say_left_out
from omlx_producer.bulk.row import TOKEN_CHARACTERS, BadRow, Row
from omlx_producer.bulk.store import Store
from omlx_producer.figures import read_figures, read_unannounced
from omlx_producer.terminal import write
from omlx_producer.wire import ModelInfo

UNKNOWN = "unknown"
"""The model of rows that name none, while no model is known."""


@dataclass
class Findings:
    """What an input holds.

    Attributes:
        exact: whether ``prompt_tokens`` was counted, not estimated.
        models: that the good rows run on.
        ignored: rows by field of OpenAI that has no effect.
        pictures: of all rows. Each counts in ``prompt_tokens`` as the most of its model.
        picture_tokens: those of one picture, at most, in any of the models.
        most_completion_tokens: the limit of all rows together.
    """

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    exact: bool = True
    most_completion_tokens: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    models: set[str] = field(default_factory=set)
    pictures: int = 0
    picture_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bad": dict(self.bad),
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_exact": self.exact,
            "pictures": self.pictures,
            "picture_tokens": self.picture_tokens,
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
        """Tokens of a row's prompt. A picture counts as the most that one takes."""
        info = self._models.get(row.request.model)
        most = 0 if info is None else info.picture_tokens
        return self._count_text(row) + len(row.request.pictures) * most

    def _count_text(self, row: Row) -> int:
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

    While no model is known, rows may name any or none.

    Raises:
        InvalidRequest: if the input cannot be read.
    """
    if not models:
        anything = {"require_known_model": False, "default_model": UNKNOWN}
        options = options.model_copy(update=anything)
    findings, counter = Findings(), TokenCounter(models)
    with Input.open(options, models) as source:
        for row in source.all_rows():
            findings.rows += 1
            if isinstance(row, BadRow):
                findings.bad[row.code] += 1
                write(row.reason + "\n", err=True)
                continue
            findings.prompt_tokens += counter.count(row)
            findings.pictures += len(row.request.pictures)
            findings.most_completion_tokens += row.most_tokens
        findings.exact, findings.ignored = counter.exact, source.maker.ignored
        findings.models = source.maker.used
        known = (models[name].picture_tokens for name in findings.models if name in models)
        findings.picture_tokens = max(known, default=0)
        if findings.pictures:
            most = f", at most {findings.picture_tokens} tokens each" * bool(
                findings.picture_tokens
            )
            write(f"pictures: {findings.pictures}{most}\n", err=True)
        say_left_out(source.maker.skipped, source.other_files)
    return findings


def estimate_lacks(connection: redis.Redis, models: Iterable[str]) -> tuple[str, bool]:
    """What an estimate for rows of these models lacks.

    Returns:
        A sentence, empty if it lacks nothing; and whether each model has a worker.
    """
    if UNKNOWN in models and (told := read_unannounced(connection)):
        return f"{told}; for an estimate, try again in a moment", False
    found = [read_figures(connection, model)[0] for model in sorted(models)]
    if missing := [model.held_up for model in found if not model.workers]:
        told = missing[0] if UNKNOWN not in models else "no worker has announced a model yet"
        return f"{told}; an estimate needs one, so start omlx-worker run -m MODEL", False
    held_up = "; ".join(model.held_up for model in found if model.held_up)
    return f"{held_up}; an estimate waits for that" if held_up else "", True


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
        require_run_output(
            path,
            options.input,
            keep=options.keep,
            vectors=options.embed,
            each=options.settings["each"],
        )
        if earlier := RunOptions.of_run(path):
            known = path
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
