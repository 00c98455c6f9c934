"""The tokenizer of a checkpoint, with the tokens that end an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from omlx_worker.engine.rows.tools.syntax import ends_of
from omlx_worker.engine.rows.vocabulary import named_tokens

_OF_CHATS = re.compile(r"<[|\uff5c].+>|<.+[|\uff5c]>|</.+>|\[/.+\]", re.DOTALL)


def read_tokenizer(path: Path, config: dict[str, Any]) -> TokenizerWrapper:
    """The tokenizer of a checkpoint's folder.

    Args:
        config: the model's ``config.json``.
    """
    tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    tokenizer.eos_token_ids = ends_of(tokenizer)
    return tokenizer


def markers_of(tokenizer: TokenizerWrapper) -> tuple[str, ...]:
    """The added tokens that mark parts of a chat, such as ``<|channel|>`` and ``[/THINK]``.

    The chat template names them, unlike reserved ones, and the HTML that some vocabularies have.
    """
    template, names = str(tokenizer.chat_template or ""), named_tokens(tokenizer._tokenizer)
    return tuple(name for name in names if name in template and _OF_CHATS.fullmatch(name))
