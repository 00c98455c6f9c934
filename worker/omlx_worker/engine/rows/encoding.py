"""Turns texts and pictures into prompts. A text that cannot fit the context is refused before it
costs much."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.rows.picture import Picture, Sight
from omlx_worker.engine.rows.picture_file import BadPicture, size_of

PIECE = 2**16
"""Characters whose tokens are counted at once."""

SPARSE = 4
"""Characters a token, on average, up to which a text is encoded without counting first."""

MARGIN = 1.125
"""How many times the context a counted text may have. Pieces may have a few tokens more than the
whole."""


class Encoder:
    """Encodes the prompts of one model. Safe to call from any one thread at a time.

    Attributes:
        picture: the text of the token that stands for a picture; "" without a sight.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, info: ModelInfo, sight: Sight | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._sight = sight
        self.picture: str = tokenizer.decode([sight.token]) if sight else ""

    def encode(self, field: str, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text, in time and memory that the context limits.

        Raises:
            InvalidRequest: if the text cannot fit the context. A text of slightly too many
                tokens is returned.
        """
        self.require_characters(field, len(text))
        if len(text) > PIECE + SPARSE * self._info.context_length:
            self._require_tokens(field, text)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens

    def require_no_picture(self, request: GenerationRequest) -> None:
        """Refuse texts that hold what stands for a picture.

        Raises:
            InvalidRequest: names the message, or what else the template writes.
        """
        messages = {f"messages[{n}]": each for n, each in enumerate(request.messages or ())}
        beside = {name: getattr(request, name) for name in ("tools", "chat_template_kwargs")}
        for field, value in (messages | beside).items():
            # The form for people has all texts, and no picture.
            if self.picture in repr(value):
                raise self._literal(field)

    def _literal(self, field: str) -> InvalidRequest:
        return InvalidRequest(
            field,
            f"a text has {self.picture}, which stands for a picture of {self._info.model}",
            "leave it out",
        )

    def with_pictures(
        self, prompt: list[int], files: Mapping[str, bytes]
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """A prompt with a token for each vector of its pictures, and the pictures.

        Args:
            prompt: with one token for each picture.
            files: by their fields, in the order of the prompt.

        Raises:
            InvalidRequest: for a picture that cannot be looked at, or a token too many.
        """
        sight = self._sight
        if not files or sight is None:
            return prompt, ()
        if prompt.count(sight.token) != len(files):
            raise self._literal("messages")
        wide, pictures, read = list[int](), list[Picture](), 0
        for field, data in files.items():
            try:
                rows, columns = sight.grid(*size_of(data))
            except BadPicture as error:
                raise InvalidRequest(field, str(error)) from None
            place = prompt.index(sight.token, read)
            wide += [*prompt[read:place], *sight.around[0]]
            kinds = sight.spatial, sight.both_ways
            pictures.append(Picture(len(wide), rows, columns, data, *kinds))
            wide += [*[sight.token] * pictures[-1].count, *sight.around[1]]
            read = place + 1
        wide += prompt[read:]
        if pictures[-1].end == len(wide):
            # A step decodes a prompt's last token, and knows no vectors.
            raise InvalidRequest(
                "messages",
                f"the chat template of {self._info.model} writes nothing after the last picture",
                "give a text after it",
            )
        return wide, tuple(pictures)

    def require_characters(self, field: str, characters: int) -> None:
        """Refuse texts that are too long even if all tokens were the longest.

        Raises:
            InvalidRequest: names both lengths.
        """
        least = -(-characters // self._info.longest_token)
        if least >= self._info.context_length:
            what = f"{characters} characters, which are at least {least} tokens,"
            raise self.too_long(field, what)

    def too_long(self, field: str, what: str) -> InvalidRequest:
        """The refusal of a prompt that does not fit, with room for an answer if there is one."""
        answer = "" if self._info.vector_size else " with at least one generated"
        return InvalidRequest(
            field,
            f"{what} do not fit the context of {self._info.model}, "
            f"{self._info.context_length} tokens{answer}",
            "shorten it",
        )

    def _require_tokens(self, field: str, text: str) -> None:
        """Refuse a text whose pieces have too many tokens, at the first that is too many."""
        tokens = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            tokens += len(self._tokenizer.encode(piece, add_special_tokens=False))
            if tokens > MARGIN * self._info.context_length:
                read = start + len(piece)
                what = f"{len(text)} characters, of which the first {read} are {tokens} tokens,"
                raise self.too_long(field, what)
