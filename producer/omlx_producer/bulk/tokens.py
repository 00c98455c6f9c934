"""How many tokens a request has, before any worker has seen it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from omlx_producer.bulk.row import Row, beginning_of
from omlx_producer.protocol import ModelInfo

CHARACTERS_A_TOKEN = 4


class TokenCounter:
    """Counts with the model's own tokenizer where its files and `tokenizers` are on this machine,
    chat templates aside; else takes four characters for a token.

    Attributes:
        exact: whether everything so far was counted with a tokenizer.
    """

    def __init__(self, models: Mapping[str, ModelInfo]) -> None:
        self.exact = True
        self._models = models
        self._lengths: dict[str, Callable[[str], int] | None] = {}

    def count(self, row: Row) -> int:
        """Tokens of a row's prompt."""
        request = row.request
        if isinstance(request.prompt, list):
            return len(request.prompt)
        if request.model not in self._lengths:
            self._lengths[request.model] = self._load(request.model)
        length = self._lengths[request.model]
        if length is None:
            self.exact = False
            return -(-row.characters // CHARACTERS_A_TOKEN)
        if request.messages is not None:
            self.exact = False
        return length(beginning_of(request))

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
