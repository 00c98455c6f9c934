"""A large vocabulary for networks of random weights, which have no tokenizer of their size."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omlx_worker.engine.rows.constraints import Grammars

if TYPE_CHECKING:
    from llguidance import LLTokenizer

END = 0
LETTERS = b"etaoinshrdlucmfwypvbgkjqxz"
MARKS = b'{}[]":,. \n\t0123456789()'


class SyntheticTokens:
    """Tokens as llguidance asks for them: an end token, every byte, and words of a few bytes.

    Most are letters, some with a space before them; some are marks and digits, some three-byte
    characters, as in the vocabularies of multilingual models.
    """

    eos_token_id = END
    bos_token_id = None

    def __init__(self, count: int) -> None:
        rng = random.Random(1)
        bytes_alone = [bytes([value]) for value in range(256)]
        self.tokens = [b"<end>", *bytes_alone]
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        while len(self.tokens) < count:
            word = _word(rng)
            if word not in self._ids:
                self._ids[word] = len(self.tokens)
                self.tokens.append(word)
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """The longest token at each place."""
        ids, at = [], 0
        while at < len(text):
            length = next(
                size for size in range(self._longest, 0, -1) if text[at : at + size] in self._ids
            )
            ids.append(self._ids[text[at : at + length]])
            at += length
        return ids


def _word(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.03:
        return bytes(rng.choice(MARKS) for _ in range(rng.choice([2, 3])))
    if kind < 0.13:
        return "".join(
            chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(rng.choice([1, 2]))
        ).encode()
    space = b" " if rng.random() < 0.4 else b""
    return space + bytes(rng.choice(LETTERS) for _ in range(rng.randrange(2, 9)))


class SyntheticGrammars(Grammars):
    """Grammars over `SyntheticTokens`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(None, vocabulary)  # type: ignore[arg-type]
        self.special = frozenset()

    @cached_property
    def tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        made: Any = SyntheticTokens(self._vocabulary)
        return LLTokenizer(TokenizerWrapper(made), n_vocab=self._vocabulary, eos_token=[END])
