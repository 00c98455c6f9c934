"""The models that workers have announced, and the checks of a request against them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import redis
from pydantic import ValidationError
from redis.utils import str_if_bytes

from omlx_producer.client.workers import read_workers
from omlx_producer.errors import InvalidRequest, ModelNotFound
from omlx_producer.wire import MODELS_KEY, GenerationRequest, ModelInfo, require_kind

Fields = GenerationRequest | Mapping[str, Any]

log = logging.getLogger(__name__)

RECENT_SECONDS = 60.0
"""Workers announce their model more often. One announced this long before another has no worker."""


def read_models(connection: redis.Redis, *, live: bool = False) -> dict[str, ModelInfo]:
    """The models that workers have announced, by alias.

    Args:
        live: only those with a worker that is running.
    """
    models = parse_models(connection.hgetall(MODELS_KEY))
    return {
        name: info for name, info in models.items() if not live or read_workers(connection, name)
    }


def parse_models(entries: Mapping[Any, Any]) -> dict[str, ModelInfo]:
    """The models of the hash ``MODELS_KEY``, sorted by alias."""
    models = {}
    for key, document in entries.items():
        alias = str_if_bytes(key)
        try:
            models[alias] = ModelInfo.model_validate_json(document)
        except ValidationError:
            _warn(alias)
    return dict(sorted(models.items()))


@cache
def _warn(alias: str) -> None:
    log.warning("ignoring the entry %r of %s, which is not a model", alias, MODELS_KEY)


def only_model(models: Mapping[str, ModelInfo], *, vectors: bool) -> str:
    """The model of a request that names none: the only one, or the only one that workers serve.

    Models of the other kind do not count, if there are others.

    Args:
        vectors: whether the request asks for vectors.

    Raises:
        InvalidRequest: if there is no such model.
    """
    models = {n: info for n, info in models.items() if bool(info.vector_size) is vectors} or models
    latest = max((info.announced_at for info in models.values()), default=0.0)
    recent = [n for n, info in models.items() if latest - info.announced_at < RECENT_SECONDS]
    if len(recent) == 1:
        return recent[0]
    if not recent:
        raise InvalidRequest(
            "model",
            "missing, and no worker has announced one yet",
            "name one, or start a worker with omlx-worker run -m MODEL",
        )
    raise InvalidRequest(
        "model", "missing, but workers have announced several", f"give one of {_spell(recent)}"
    )


def require_known(request: GenerationRequest, models: Mapping[str, ModelInfo]) -> None:
    """Check that a worker has announced the request's model.

    Raises:
        ModelNotFound: names the alias, the known aliases and the remedy.
    """
    if request.model in models:
        return
    missing = ModelNotFound(
        "model",
        f"got {request.model!r}, which no worker has announced (known: {_spell(models) or 'none'})",
        f"start a worker with omlx-worker run -m MODEL --model-alias {request.model}",
    )
    missing.anyway = True
    raise missing


def takes_chats(models: Mapping[str, ModelInfo], alias: str) -> bool:
    """Whether a model has a chat template. One that no worker has announced counts as such."""
    info = models.get(alias)
    return info is None or info.chat_template


def require_served(request: GenerationRequest, models: Mapping[str, ModelInfo]) -> None:
    """Check that a model makes vectors, generates text or takes pictures, as a request wants.

    Raises:
        InvalidRequest: names the field, the model and the remedy.
    """
    if info := models.get(request.model):
        require_kind(request, info)


def require_template(request: GenerationRequest, models: Mapping[str, ModelInfo]) -> None:
    """Check that a chat goes to a model with a chat template.

    Raises:
        InvalidRequest: names the model and the remedy.
    """
    if request.messages is not None and not takes_chats(models, request.model):
        raise InvalidRequest(
            "messages",
            f"{request.model} has no chat template",
            "give a prompt instead, without a system message or tools",
        )


def require_fit(request: GenerationRequest, models: Mapping[str, ModelInfo]) -> None:
    """Check that the prompt may fit the context of its model.

    A prompt that passes may still be too long: only the worker counts the tokens of a text.

    Raises:
        InvalidRequest: names both lengths.
    """
    info = models.get(request.model)
    if info is None:
        return
    chat = "".join(message.text for message in request.messages or ())
    for text in request.texts or [chat]:
        what, tokens = "", len(text)
        if isinstance(text, str):
            tokens = -(-len(text) // info.longest_token)
            what = f"{len(text)} characters, which are at least "
        if tokens > info.context_length:
            raise InvalidRequest(
                request.reads,
                f"got {what}{tokens} tokens",
                f"give at most the {info.context_length} tokens of the context of {request.model}",
            )


def check(
    requests: Sequence[Fields], models: Mapping[str, ModelInfo], *, require_known_model: bool
) -> list[GenerationRequest]:
    """Validate requests and check them against the models; see `Producer.submit_many`.

    Raises:
        InvalidRequest: for the first invalid one, with its index if there are several. It is a
            ModelNotFound if no worker has announced the model.
    """
    checked = []
    for index, given in enumerate(requests):
        try:
            request = _parse(given, models)
            if require_known_model:
                require_known(request, models)
            require_served(request, models)
            require_template(request, models)
            require_fit(request, models)
        except InvalidRequest as error:
            error.index = index if len(requests) > 1 else None
            raise
        checked.append(request)
    return checked


def _parse(given: Fields, models: Mapping[str, ModelInfo]) -> GenerationRequest:
    if isinstance(given, GenerationRequest):
        return given
    if isinstance(given, Mapping) and given.get("model") is None:
        vectors = given.get("input") is not None
        given = {**given, "model": only_model(models, vectors=vectors)}
    return GenerationRequest.parse(given)


def _spell(models: Iterable[str]) -> str:
    return ", ".join(models)
