"""Finds a model's files: in a folder, or in a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import tqdm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from omlx_producer.errors import one_line
from omlx_producer.terminal import in_units
from omlx_worker.engine.rows.interface import ModelError, Tell
from omlx_worker.engine.rows.tokens import same_vocabulary

log = logging.getLogger(__name__)

DEMO = "demo"

WEIGHTS = "model*.safetensors"
_BESIDE = (
    *("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt"),
    "*_Dense/model.safetensors",
)

_SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""What the configurations of a model and its original have in common, where both name it."""

_BASE_MODEL = re.compile(r"""^base_model:\s+(?:-\s+)?["']?([\w.-]+/[\w.-]+)""", re.MULTILINE)

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base of all errors of the library that the hub's client fetches with."""

_NOT_FETCHED = (_HTTP_ERROR, LocalEntryNotFoundError, OSError)


class _Silent(tqdm):
    """No progress bar."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _telling(tell: Tell) -> type[tqdm]:
    """Progress bars that also tell how many bytes are downloaded."""

    class Telling(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts, self._had = options.get("unit") == "B", options.get("initial") or 0
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self._had += n or 0
            if self._counts and self.total:
                tell(f"downloading, {in_units(int(self._had))} of {in_units(int(self.total))}")
            updated: bool | None = super().update(n)
            return updated

    return Telling


def resolve(model: str, option: str = "--model", tell: Tell = lambda _: None) -> Path:
    """The directory of a model's files, downloaded first if it is a repository.

    Args:
        option: that named it, for errors.
        tell: told what is downloaded.

    Raises:
        ModelError: if there is none.
    """
    return _folder_of(model, option) or _download(model, option, [*_BESIDE, WEIGHTS], tell=tell)


def base_model(model: str, path: Path) -> str | None:
    """The repository that a checkpoint was made from, by its model card.

    Args:
        path: from `resolve`.
    """
    card = path / "README.md"
    try:
        if not card.is_file() and not Path(model).expanduser().is_dir():
            card = Path(hf_hub_download(model, card.name, revision=path.name, tqdm_class=_Silent))
        named = _BASE_MODEL.search(card.read_text())
    except (*_NOT_FETCHED, ValueError):
        return None
    return named and named[1]


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint whose weights are fetched by file, as they are wanted.

    Attributes:
        name: as the user gave it, to ``option``.
        folder: has its configuration, index and tokenizer, and the weights once fetched.
        revision: the commit of a repository; None for a folder.
        config: its configuration.
        index: the file of every tensor; empty if it has no index.
    """

    name: str
    option: str
    folder: Path
    revision: str | None
    config: dict[str, Any]
    index: dict[str, str]

    @classmethod
    def find(cls, name: str, option: str) -> Original:
        """The checkpoint of this name; of a repository all but the weights is downloaded.

        Raises:
            ModelError: if there is none.
        """
        folder, revision = _folder_of(name, option), None
        if folder is None:
            folder = _download(name, option, _BESIDE)
            revision = folder.name
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{option} {name}: no checkpoint, for it has no config.json; give another"
            )
        try:
            config = json.loads((folder / "config.json").read_text())
            index = folder / "model.safetensors.index.json"
            shards = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
            return cls(name, option, folder, revision, config, dict(shards))
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{option} {name}: its configuration or index cannot be read "
                f"({one_line(str(error))}); download it again"
            ) from None

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", "unknown")).removesuffix("_text")

    @property
    def text_config(self) -> dict[str, Any]:
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def has_weights(self) -> bool:
        """Whether the files of all its weights are in its folder."""
        files = set(self.index.values())
        whole = all((self.folder / file).is_file() for file in files)
        return whole if files else any(self.folder.glob(WEIGHTS))

    def fetch(self, patterns: Sequence[str], part: str) -> list[Path]:
        """These files, complete; those of a repository are downloaded first.

        Args:
            part: what is wanted of them, for the log.

        Raises:
            ModelError: if one is missing, has not all of its bytes, or does not fit the disk.
        """
        if self.revision is not None:
            self._announce(self._to_download(patterns), part)
            _download(self.name, self.option, patterns, self.revision)
        for pattern in patterns:
            if not any(self.folder.glob(pattern)):
                raise self.error(f"{pattern} is missing from it")
        found = sorted({path for pattern in patterns for path in self.folder.glob(pattern)})
        for path in found:
            try:
                # Reads the header, and compares it with the file's size.
                mx.load(str(path))
            except RuntimeError:
                raise self.error(f"{path.name} is incomplete; download it again") from None
        return found

    def _to_download(self, patterns: Sequence[str]) -> int:
        """Bytes of these files that must be downloaded; 0 where the hub does not tell."""
        try:
            listed = snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=list(patterns),
                dry_run=True,
                tqdm_class=_Silent,
            )
        except _NOT_FETCHED:
            # Offline, perhaps with all of them at hand.
            return 0
        return sum(file.file_size or 0 for file in listed if file.will_download)

    def _announce(self, download: int, part: str) -> None:
        if not download:
            return
        free = shutil.disk_usage(self.folder).free
        wanted, left = in_units(download), in_units(free)
        if download > free:
            raise self.error(
                f"{wanted} must be downloaded to {self.folder}, and {left} are free; make room"
            )
        log.warning("%s %s: downloads %s for %s", self.option, self.name, wanted, part)

    def require_kin(self, config: Mapping[str, Any], tokenizer: TokenizerWrapper) -> None:
        """Refuse it for a model that was not made of it.

        Args:
            config: of the model, and ``tokenizer``, its own.

        Raises:
            ModelError: if they differ in family, sizes or tokens.
        """
        remedy = "give the repository that the model was converted from"
        family = str(config["model_type"]).removesuffix("_text")
        if self.family != family:
            raise self.error(f"its family is {self.family}, and the model's is {family}; {remedy}")
        ours, theirs = config.get("text_config", config), self.text_config
        for name in _SIZES:
            if name in ours and name in theirs and ours[name] != theirs[name]:
                raise self.error(
                    f"its {name} is {theirs[name]}, and the model's is {ours[name]}; {remedy}"
                )
        try:
            other = load_tokenizer(self.folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.error(f"its tokenizer cannot be read: {one_line(str(error))}") from None
        if not same_vocabulary(tokenizer.get_vocab(), other.get_vocab()):
            raise self.error(f"its tokens have other ids than the model's; {remedy}")

    def error(self, said: str) -> ModelError:
        return ModelError(f"{self.option} {self.name}: {said}")


def _folder_of(model: str, option: str) -> Path | None:
    """The directory that a name means; None for a repository."""
    if model == DEMO:
        with as_file(files("omlx_worker") / "demo_model") as path:
            return path
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{option} {model}: is a file; give the directory of a whole model")
    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"{option} {model}: no such directory; give a directory or a repository")
    return None


def _download(
    model: str,
    option: str,
    patterns: Sequence[str],
    revision: str | None = None,
    tell: Tell = lambda _: None,
) -> Path:
    """Download what matches, but for files that were downloaded before."""
    try:
        found = snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), tqdm_class=_telling(tell)
        )
        return Path(found)
    except HFValidationError:
        raise ModelError(
            f"{option} {model}: neither 'demo', a directory, nor a repository name like org/name"
        ) from None
    except _NOT_FETCHED as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"{option} {model}: could not be downloaded ({reason}); check the name and the network"
        ) from None
