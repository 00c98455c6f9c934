"""How beginnings of prompts are kept for other prompts, as the options say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omlx_worker.engine.loading.identity import identity_of
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.ragged.prefix_disk import NotPrivate, PrefixDisk
from omlx_worker.engine.rows.interface import ModelError


@dataclass(frozen=True, slots=True)
class Prefixes:
    """How beginnings of prompts are kept for other prompts.

    Attributes:
        size: bytes of memory, at most.
        folder: where they are kept for the next start; None for nowhere.
        folder_limit: bytes of files, at most.
    """

    size: int
    folder: Path | None = None
    folder_limit: int = 0

    def cache(
        self,
        model: RaggedModel,
        pool: Batch,
        paths: list[Path],
        head: Path | None = None,
        *,
        fixed: bool = False,
    ) -> PrefixCache:
        """The cache of a model from these checkpoints, and of a head from a file of its own.

        Args:
            pool: whose pages are kept.
            fixed: whether prompts are read in fixed shapes, which round in their own way.

        Raises:
            ModelError: if the folder cannot be used.
        """
        specs = LayerSpecs.of(model)
        if self.folder is None:
            return PrefixCache(specs, self.size, pool)
        try:
            identity = identity_of(paths, model, head) + (", fixed shapes" if fixed else "")
            disk = PrefixDisk(self.folder, identity, self.folder_limit, specs, self.size)
        except NotPrivate as reason:
            raise ModelError(f"--prefix-dir {self.folder}: {reason}") from None
        except OSError as error:
            raise ModelError(
                f"--prefix-dir {self.folder}: cannot be used ({error.strerror}); give another"
            ) from None
        return PrefixCache(specs, self.size, pool, disk)
