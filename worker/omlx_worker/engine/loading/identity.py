"""Names what texts depend on, a checkpoint, and what kept keys and values depend on besides."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.models.ragged_model import RaggedModel

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint_of(path: Path) -> str:
    """The `system_fingerprint` of a checkpoint: a hash of its weights, tokenizer and template."""
    hashed = hashlib.sha256(digest_of(path).encode())
    for pattern in ("tokenizer*", "chat_template*"):
        for file in sorted(path.glob(pattern)):
            hashed.update(file.read_bytes())
    return f"fp_{hashed.hexdigest()[:16]}"


def identity_of(paths: list[Path], model: RaggedModel, head: Path | None = None) -> str:
    """The identity of a model's caches.

    Args:
        paths: of the checkpoints that fill them: the model's, and a draft model's.
        head: the file of an MTP head that the checkpoint does not have itself.
    """
    caches = model.new_caches(1, TAIL)  # never evaluated: only the shapes are wanted
    layout = [(str(array.dtype), array.shape[1:]) for cache in caches for array in cache.arrays]
    layers = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
    weights = " ".join(digest_of(path) for path in paths)
    if head is not None:
        hashed = hashlib.sha256()
        _sample(head, hashed)
        weights += f" head {hashed.hexdigest()[:16]}"
    software = " ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "omlx-queue"))
    return f"weights {weights}, layers {layers}, {software}"


def digest_of(path: Path) -> str:
    """A hash of a checkpoint: of its config, and of samples from all over its weights.

    Every file's size and header, which names the tensors, and 256 blocks of 4 KiB at equal
    distances: any training changes some of them, and gigabytes need not be read at each start.
    """
    hashed = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        _sample(file, hashed)
    return hashed.hexdigest()[:16]


def _sample(file: Path, hashed: hashlib._Hash) -> None:
    size = file.stat().st_size
    hashed.update(f"{file.name} {size}".encode())
    with file.open("rb") as weights:
        header = int.from_bytes(weights.read(8), "little")
        hashed.update(weights.read(min(header, size)))
        for sample in range(_SAMPLES):
            weights.seek(size * sample // _SAMPLES)
            hashed.update(weights.read(_SAMPLE_BYTES))
