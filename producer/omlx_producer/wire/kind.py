"""Which requests a model serves, by what it has announced."""

from __future__ import annotations

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.events import ModelInfo
from omlx_producer.wire.request import GenerationRequest


def require_kind(request: GenerationRequest, info: ModelInfo) -> None:
    """Refuse vectors of a model that generates, text of one that makes vectors, and pictures for
    one that takes none.

    Raises:
        InvalidRequest: with the field of what is read, or of the first picture.
    """
    reads, alias = request.reads, request.model
    if reads == "input" and not info.vector_size:
        raise InvalidRequest(
            reads,
            f"{alias} generates text and makes no vectors",
            "name a model of embeddings",
        )
    if reads != "input" and info.vector_size:
        raise InvalidRequest(
            reads,
            f"{alias} makes vectors and generates no text",
            "name another model, or give input to /v1/embeddings",
        )
    if not info.picture_tokens and (picture := next(iter(request.pictures), None)):
        raise InvalidRequest(
            picture,
            f"{alias} takes no pictures",
            "leave it out, or name a model that takes them",
        )
