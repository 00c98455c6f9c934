"""What drafts for a model: the names of ``--drafter``, and other models."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_model

from omlx_producer.errors import one_line
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.loading.checkpoint import base_model
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.assistant import (
    FAMILIES,
    Assistant,
    AssistantArgs,
    AssistantDrafter,
    has_assistants,
)
from omlx_worker.engine.models.draft_model import DraftModel
from omlx_worker.engine.models.ragged_model import Drafter, RaggedModel, Unsupported
from omlx_worker.engine.rows.interface import HEAD, LOOKUP, NO_DRAFTER, ModelError
from omlx_worker.engine.rows.tokens import same_ids, same_vocabulary

DRAFTER = "--drafter"

MakeDrafter = Callable[[nn.Module, RaggedModel, Kernels], Drafter | None]
"""Makes what drafts for a loaded network.

It is given the network, its ragged form, and the forms of the parts of what drafts.
"""


def own_head(_network: nn.Module, ragged: RaggedModel, _kernels: Kernels) -> Drafter | None:
    """The model's MTP head, which its ragged form has already."""
    return ragged.drafter


def nothing(*_: object) -> None:
    """Lookups need no drafter; see `omlx_worker.engine.ragged.lookups`."""


DRAFTERS: dict[str, MakeDrafter] = {HEAD: own_head, LOOKUP: nothing, NO_DRAFTER: nothing}
"""By what ``--drafter`` calls them; any other name is that of a model (`drafter_of`)."""


def assistant_hint(network: nn.Module, model: str, path: Path) -> str | None:
    """How to get a model's assistant; None if its family has none.

    Args:
        model: its name, and ``path``, where it was loaded from.
    """
    if not has_assistants(network):
        return None
    base = base_model(model, path)
    command = f"omlx-worker run -m {shlex.quote(model)} {DRAFTER} "
    said = f"the model's family has assistants that draft; get it with: {command}"
    if base is None:
        return f"{said}ASSISTANT,{LOOKUP} (the repository of the one for this model)"
    return f"{said}{base}-assistant,{LOOKUP}"


def require_same_tokens(name: str, tokenizer: TokenizerWrapper, other: TokenizerWrapper) -> None:
    """Refuse a model that drafts if its tokens have other ids.

    Args:
        name: of the model that drafts, and ``other``, its tokenizer.

    Raises:
        ModelError: if they have.
    """
    ids, others = tokenizer.get_vocab(), other.get_vocab()
    if not same_vocabulary(ids, others):
        raise ModelError(
            f"{DRAFTER} {name}: {same_ids(ids, others)} of its {len(others)} tokens are among "
            f"the model's {len(ids)} by the same ids; give a model with the same vocabulary"
        )


def is_assistant(path: Path) -> bool:
    """Whether a directory has an assistant's checkpoint, which needs no tokenizer."""
    try:
        return load_config(path).get("model_type") in FAMILIES
    except (OSError, ValueError):
        return False


def load_assistant(path: Path) -> Assistant:
    """Load an assistant; in float32 without a GPU.

    Raises:
        ModelError: if it cannot be loaded.
    """
    try:
        assistant, _ = load_model(path, get_model_classes=lambda **_: (Assistant, AssistantArgs))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"{DRAFTER} {path}: the assistant cannot be loaded: {one_line(str(error))}"
        ) from None
    assert isinstance(assistant, Assistant)
    if mx.default_device() == mx.cpu:
        assistant.set_dtype(mx.float32)
        mx.eval(assistant.parameters())
    return assistant


def drafter_of(
    name: str, draft: nn.Module, network: nn.Module, ragged: RaggedModel, kernels: Kernels
) -> Drafter:
    """What drafts for a model by another network.

    Args:
        name: of ``draft``, for errors.
        network, ragged, kernels: see `MakeDrafter`.

    Raises:
        ModelError: if ``draft`` cannot draft for it.
    """
    if isinstance(draft, Assistant):
        reason: object = draft.misfit(network)
        if reason is None:
            return AssistantDrafter(network, draft, kernels)
    else:
        try:
            own = as_ragged(draft, drafts=False, kernels=kernels)
            return DraftModel(own, ragged.vocabulary)
        except Unsupported as unsupported:
            reason = unsupported
    raise ModelError(f"{DRAFTER} {name}: it cannot draft here, because {reason}; give another")
