"""Takes the MTP head for a model from the original checkpoint that the model was converted from."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.errors import one_line
from omlx_worker.engine.loading.checkpoint import WEIGHTS, Original, base_model
from omlx_worker.engine.loading.identity import digest_of
from omlx_worker.engine.models.mtp import (
    MTPHead,
    Weights,
    can_have_head,
    is_of_head,
    new_head,
    promises_head,
    text_model,
)
from omlx_worker.engine.rows.interface import ModelError

log = logging.getLogger(__name__)

MTP_FROM = "--mtp-from"


@dataclass(frozen=True, slots=True)
class Graft:
    """Where a model gets its head from.

    Attributes:
        original: a directory or a Hugging Face repository, in either of which only the files that
            hold the head are wanted.
        state_dir: its folder ``heads`` keeps the heads, ready for their models, so that later
            starts need neither the network nor the original.
    """

    original: str
    state_dir: Path

    def onto(
        self, network: nn.Module, config: Mapping[str, Any], tokenizer: TokenizerWrapper, path: Path
    ) -> None:
        """Give a network the head, quantised as its own layers are.

        Args:
            network: loaded from ``path``, in the precision of its files.

        Raises:
            ModelError: if the original has no head for it.
        """
        if not can_have_head(network):
            raise self._error(
                f"the model's family, {config['model_type']}, has no MTP head that drafts here; "
                "leave it out"
            )
        model = digest_of(path)
        files = [self._file(source, model) for source in self._sources()]
        head = next((head for file in files if (head := self._kept(file, network))), None)
        if head is None:
            self._keep(self._made(network, config, tokenizer), files[0])
            head = self._kept(files[0], network)
        network.mtp = head

    def _sources(self) -> list[str]:
        """Names that the head may be kept under: a directory may be gone by now."""
        path = Path(self.original).expanduser()
        folder = str(path.resolve())
        return [folder] if path.is_dir() else [self.original, folder]

    def _file(self, source: str, model: str) -> Path:
        key = hashlib.sha256(f"{source} {model}".encode()).hexdigest()[:16]
        return self.state_dir / "heads" / f"{Path(source).name}-{key}.safetensors"

    def _kept(self, file: Path, network: nn.Module) -> MTPHead | None:
        """The head in a file; None if it is not there, or of an original that has changed since."""
        if not file.is_file():
            return None
        head = new_head(network)
        _quantise_like(head, network)
        try:
            weights, metadata = _read(file)
            head.load_weights(list(weights.items()))
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("the MTP head in %s cannot be used (%s): made anew", file, error)
            return None
        original = Path(self.original).expanduser()
        if original.is_dir() and metadata["identity"] != digest_of(original):
            return None
        head.eval()
        mx.eval(head.parameters())
        head.origin = metadata["origin"]
        return head

    def _made(
        self, network: nn.Module, config: Mapping[str, Any], tokenizer: TokenizerWrapper
    ) -> tuple[MTPHead, dict[str, str]]:
        """The head, made from the original, and its metadata."""
        original = Original.find(self.original, MTP_FROM)
        original.require_kin(config, tokenizer)
        head = new_head(network)
        dtype = text_model(network).model.norm.weight.dtype
        weights = self._weights(original, network)
        casts = getattr(network, "cast_predicate", lambda _: True)
        head.load_weights(
            [(name, v.astype(dtype) if casts(name) else v) for name, v in weights.items()]
        )
        _quantise_like(head, network)
        identity = original.revision or digest_of(original.folder)
        origin = self.original + (f", revision {identity[:12]}" if original.revision else "")
        return head, {"origin": origin, "identity": identity, "format": "mlx"}

    def _weights(self, original: Original, network: nn.Module) -> Weights:
        """The head's tensors, their files downloaded first."""
        none = original.error("it has no MTP head; give the repository that the model is made of")
        index, layers = original.index, original.text_config.get("num_hidden_layers")
        files = sorted({file for tensor, file in index.items() if is_of_head(tensor, layers)})
        if index and not files:
            raise none
        found: Weights = {}
        raw = False
        for file in original.fetch(files or [WEIGHTS], "its MTP head"):
            tensors, metadata = _read(file)
            found |= {name: each for name, each in tensors.items() if is_of_head(name, layers)}
            raw |= metadata.get("format") == "pt"
        if not found:
            raise none
        if any(name.endswith(".scales") for name in found):
            raise self._error("its MTP head is quantised; give the repository it was made from")
        weights, fault = network.head_weights(found, raw_backbone=raw)
        if fault:
            raise self._error(f"its MTP head cannot be used ({fault})")
        return {name.removeprefix("mtp."): value for name, value in weights.items()}

    def _keep(self, made: tuple[MTPHead, dict[str, str]], file: Path) -> None:
        head, metadata = made
        unfinished = file.with_name(f".{os.getpid()}-{file.name}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                tensors = dict(tree_flatten(head.parameters()))
                mx.save_safetensors(str(unfinished), tensors, metadata)
                unfinished.replace(file)
            finally:
                unfinished.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            raise self._error(
                f"the head cannot be kept in {file.parent} ({one_line(str(error))}); "
                "give another --state-dir"
            ) from None

    def _error(self, said: str) -> ModelError:
        return ModelError(f"{MTP_FROM} {self.original}: {said}")


def head_hint(network: nn.Module, config: Mapping[str, Any], model: str, path: Path) -> str | None:
    """What to do about a head that a model's configuration speaks of, where none drafts.

    Args:
        model: its name, and ``path``, where it was loaded from.

    Returns:
        A sentence with a command or an option; None if a head drafts, or there is none.
    """
    if getattr(network, "mtp", None) is not None or not promises_head(config):
        return None
    if not can_have_head(network):
        return (
            f"the MTP head of the model's family, {config['model_type']}, is not run here; "
            "a smaller model of the same vocabulary can draft: --drafter MODEL,lookup"
        )
    original = base_model(model, path) or "ORIGINAL"
    command = f"omlx-worker run -m {shlex.quote(model)} {MTP_FROM} {original}"
    said = f"the model's files have no MTP head to draft with; get it with: {command}"
    if original == "ORIGINAL":
        said += " (ORIGINAL is the repository that the model was converted from)"
    return said


def _quantise_like(head: MTPHead, network: nn.Module) -> None:
    """Quantise a head's layers as the model's last layer of that kind is; its `fc` never."""
    layers = text_model(network).layers
    attention = [layer for layer in layers if not getattr(layer, "is_linear", False)]
    twins = dict(attention[-1].named_modules())

    def as_twin(path: str, _: nn.Module) -> bool | dict[str, Any]:
        twin = twins.get(path.removeprefix("layers.0."))
        if twin is None or not hasattr(twin, "bits"):
            return False
        return {"group_size": twin.group_size, "bits": twin.bits, "mode": twin.mode}

    nn.quantize(head, class_predicate=as_twin)


def _read(file: Path) -> tuple[Weights, dict[str, str]]:
    """The tensors of a file, which are loaded when they are used, and its metadata."""
    tensors: Any
    metadata: Any
    tensors, metadata = mx.load(str(file), return_metadata=True)
    return tensors, metadata
