"""Converts an original checkpoint as mlx-lm does, and keeps its MTP head, which mlx-lm drops."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import ModelCard
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model, load_tokenizer, quantize_model, save

from omlx_producer.errors import one_line
from omlx_producer.terminal import in_units
from omlx_worker.engine.loading.checkpoint import WEIGHTS, Original
from omlx_worker.engine.loading.loader import classes_with_head
from omlx_worker.engine.models.mtp import is_of_head
from omlx_worker.engine.rows.interface import ModelError

ORIGINAL = "ORIGINAL"
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite")
"""The families whose heads draft here."""

Precision = Literal["bfloat16", "float16", "float32"]
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_GROUP_SIZE = 64
_SHARD = 5 << 30
"""Bytes of weights that mlx-lm writes to a file, and holds for it, at most."""


class Conversion:
    """A conversion that can be made: the original has a head, and there is room for the result.

    Args:
        original: ``demo``, a directory, or a Hugging Face repository.
        folder: of the result; made by `run`.
        bits: of quantised weights; None to quantise none.
        group_size: weights that share a scale; None for mlx-lm's 64.
        dtype: of all other weights; None for the original's.

    Raises:
        ModelError: if there is no such original, or it cannot be converted to that folder.

    Attributes:
        download, size, memory: bytes to download, of the result, and of memory, about.
    """

    def __init__(
        self,
        original: str,
        folder: Path,
        bits: int | None = None,
        group_size: int | None = None,
        dtype: Precision | None = None,
    ) -> None:
        if folder.exists() or folder.is_symlink():
            raise ModelError(f"--output {folder}: exists already; give the name of a new folder")
        self._original = Original.find(original, ORIGINAL)
        self._folder = folder
        self._bits, self._group_size = bits, group_size
        _require_head(self._original)
        text = self._original.text_config
        of_original = str(self._original.config.get("torch_dtype") or text.get("dtype"))
        self._dtype = dtype or (of_original if of_original in _BYTES else None)
        self._files = sorted(set(self._original.index.values())) or [WEIGHTS]
        source, self.download = self._original.sizes(self._files)
        weights = source // _BYTES.get(of_original, 2)
        each = _BYTES[self._dtype or "bfloat16"]
        # Of quantised weights every group has a scale and a bias.
        self.size = int(
            weights * (bits / 8 + 2 * each / (group_size or _GROUP_SIZE) if bits else each)
        )
        self.memory = 2 * min(self.size, _SHARD)
        self._require_room()

    def run(self) -> None:
        """Download and convert. The folder appears once it is whole.

        Raises:
            ModelError: if the original's files are not whole or cannot be converted.
        """
        self._original.fetch(self._files)
        # Beside the folder, so that it can be renamed.
        unfinished = self._folder.with_name(f".{self._folder.name}.{os.getpid()}")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._convert_into(unfinished)
            unfinished.rename(self._folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"{ORIGINAL} {self._original.name}: cannot be converted: {one_line(str(error))}"
            ) from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _convert_into(self, folder: Path) -> None:
        path = self._original.folder
        network, config = load_model(path, lazy=True, get_model_classes=classes_with_head)
        if network.mtp is None:
            fault = network.head_fault or "it has none"
            raise ValueError(f"its MTP head cannot be used ({fault})")
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        if self._dtype:
            _cast(network, getattr(mx, self._dtype))
        if self._bits:
            network, config = quantize_model(
                network,
                config,
                self._group_size,
                self._bits,
                quant_predicate=_without_mixing_matrix(network),
            )
        save(folder, path, network, tokenizer, config)
        if self._original.revision is not None:
            card = ModelCard.load(folder / "README.md")
            card.data.base_model = self._original.name
            card.save(folder / "README.md")

    def _require_room(self) -> None:
        parent = self._folder.absolute().parent
        if not parent.is_dir():
            raise ModelError(f"--output {self._folder}: there is no folder {parent}; make it first")
        needs: dict[int, tuple[Path, int]] = {}
        for path, wanted in ((self._original.folder, self.download), (parent, self.size)):
            device = path.stat().st_dev
            needs[device] = (path, wanted + needs.get(device, (path, 0))[1])
        for path, wanted in needs.values():
            if wanted > (free := shutil.disk_usage(path).free):
                raise ModelError(
                    f"--output {self._folder}: {in_units(wanted)} are needed on the disk of "
                    f"{path}, and {in_units(free)} are free; make room, or give fewer --bits"
                )


def _require_head(original: Original) -> None:
    name = f"{ORIGINAL} {original.name}"
    if original.family not in FAMILIES:
        raise ModelError(
            f"{name}: its family, {original.family}, has no MTP head that drafts here; "
            "convert it with mlx_lm.convert"
        )
    if "quantization" in original.config or "quantization_config" in original.config:
        raise ModelError(f"{name}: it is quantised already; give the repository it was made from")
    layers = original.text_config.get("num_hidden_layers")
    if original.index and not any(is_of_head(tensor, layers) for tensor in original.index):
        raise ModelError(f"{name}: it has no MTP head; give the repository it was made from")


def _cast(network: nn.Module, dtype: mx.Dtype) -> None:
    """Cast what mlx-lm's conversion casts."""
    casts: Callable[[str], bool] = getattr(network, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floats = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floats and casts(path) else value

    network.update(tree_map_with_path(cast, network.parameters()))


def _without_mixing_matrix(network: nn.Module) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """mlx-lm's choice of the layers to quantise and how, but never the head's `fc`.

    Every draft passes through that matrix, and it is small.
    """
    chosen = getattr(network, "quant_predicate", None) or (lambda *_: True)
    return lambda path, module: path != "mtp.fc" and chosen(path, module)
