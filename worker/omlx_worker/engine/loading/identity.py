"""Names what texts depend on: a checkpoint, and how large its pictures are."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint_of(path: Path, picture_tokens: int = 0) -> str:
    """The `system_fingerprint` of a checkpoint: a hash of its weights, tokenizer and template.

    Args:
        picture_tokens: that one picture takes at most, hashed too; 0 for a model that takes none.
    """
    hashed = hashlib.sha256(digest_of(path).encode())
    if picture_tokens:
        hashed.update(b"%d" % picture_tokens)
    for pattern in ("tokenizer*", "chat_template*"):
        for file in sorted(path.glob(pattern)):
            hashed.update(file.read_bytes())
    return f"fp_{hashed.hexdigest()[:16]}"


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
