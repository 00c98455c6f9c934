"""Loads a model by its name: checkpoint, tokenizer, precision, and a decoder for its family."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, load_config, load_model

from omlx_producer.errors import one_line
from omlx_producer.wire import DEFAULT_CHAT_TOKENS, ModelInfo
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.kernels.compiling import VARIABLE, compiles
from omlx_worker.engine.kernels.contest import HERE, Contest
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.loading.checkpoint import DEMO, Original, resolve
from omlx_worker.engine.loading.drafters import (
    DRAFTER,
    DRAFTERS,
    MakeDrafter,
    assistant_hint,
    drafter_of,
    is_assistant,
    load_assistant,
    own_head,
    require_same_tokens,
)
from omlx_worker.engine.loading.embedding import Embedder, embeds, nested, prepare, read_embedder
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.graft import Graft, head_hint
from omlx_worker.engine.loading.identity import fingerprint_of
from omlx_worker.engine.loading.tokenizer import markers_of, read_tokenizer
from omlx_worker.engine.loading.towers import (
    VISION_FROM,
    Sight,
    Tower,
    read_sight,
    read_tower,
    take_tower,
    tower_hint,
)
from omlx_worker.engine.models.mtp import MTPHead, with_head
from omlx_worker.engine.models.ragged_model import Unsupported
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.interface import HEAD, NO_DRAFTER, PREPARED_AT_ONCE, ModelError, Tell
from omlx_worker.engine.rows.prompts import Prompter, Prompters, sampling_defaults
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.warm_up import WarmUp

log = logging.getLogger(__name__)

# What reading a checkpoint's files may raise.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
DEFAULT_CONTEXT = 32_768
# Families name it differently; beyond it, GPT-2's have no positions.
CONTEXT_NAMES = (
    *("max_position_embeddings", "n_positions", "model_max_length"),
    *("max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
)


def choose_fusion(model: str) -> None:
    """Let `mx.compile` fuse the steps of a model, but not of the demo model on a CPU.

    There g++ compiles each fused kernel, which takes longer than the demo model ever gains from it.

    Args:
        model: see `load_engine`.
    """
    if model == DEMO and mx.default_device() == mx.cpu:
        mx.disable_compile()
        log.info("mx.compile is off for demo: on a CPU its kernels take longer than they save")
        return
    by_user = VARIABLE in os.environ
    if not by_user:
        mx.enable_compile()
    if not compiles():
        why = f"{VARIABLE} is set" if by_user else "on a CPU it needs g++, which does not run"
        log.warning("mx.compile is off (%s): steps run unfused, which is slower", why)


def load_engine(
    model: str,
    *,
    max_rows: int,
    depth: int = 0,
    graft: Graft | None = None,
    drafter: str = HEAD,
    lookup: int = 0,
    prefixes: int = 0,
    chat_tokens: int = DEFAULT_CHAT_TOKENS,
    thinking_budget: int | None = None,
    vision_from: str | None = None,
    max_pixels: int | None = None,
    kernels_dir: Path | None = None,
    fixed: bool = False,
    tell: Tell = lambda _: None,
) -> DecodingEngine:
    """Load a model and make an engine of it, in the thread that will drive it.

    Args:
        model: ``demo``, a directory with a checkpoint, or a Hugging Face repository.
        max_rows: how many rows may decode at once.
        depth: most drafts a step by ``drafter``.
        graft: see `load`; left out at depth 0.
        drafter: one of `DRAFTERS`, or a model, named like ``model``; not loaded at depth 0.
        lookup: most drafts a step that are looked up; 0 for none.
        prefixes: bytes of beginnings of prompts that are kept; 0 for none.
        chat_tokens: of a chat that sets no limit, at most.
        thinking_budget: of a chat that sets none; None for no limit.
        vision_from: the original that its vision tower is taken from; None for its own, if it has
            one.
        max_pixels: see `read_tower`.
        kernels_dir: keeps which kernels are used on this device; None to measure at each start.
        fixed: fixed shapes; see `RaggedDecoder`.
        tell: told what is done now.

    Raises:
        ModelError: if there is no such model, its files cannot be used, or the drafter cannot draft
            for it.
    """
    path = resolve(model, tell=tell)
    tell("reading the weights")
    embedding = embeds(path)
    if embedding:
        depth, lookup, prefixes = 0, 0, 0
        if fixed:
            raise ModelError(f"--fixed-shapes: leave it out, because {model} makes vectors")
    network, tokenizer, config = load(path, graft=graft if depth else None)
    embedder = read_embedder(path, config) if embedding else None
    if vision_from is None:
        tower = read_tower(path, config, max_pixels)
    else:
        tower = take_tower(vision_from, config, tokenizer, max_pixels)
    head: MTPHead | None = getattr(network, "mtp", None)
    if not depth:
        drafter = NO_DRAFTER
    make_drafter = read_drafter(drafter, tokenizer, tell)
    contest = Contest(kernels_dir, fixed=fixed)
    tell("comparing it with mlx-lm")
    decoder = decoder_of(
        network, max_rows, depth, make_drafter, lookup, prefixes, contest, embedder, tower
    )
    if drafter == HEAD and not decoder.max_depth:
        log.warning("the model has no MTP head to draft with: rows decode a token a step")
    info = _info(model, path, config, tokenizer, embedder, tower, decoder.max_depth)
    defaults = _defaults(path)
    vocabulary = decoder.vocabulary  # the config may tell of fewer
    grammars = None if embedder else Grammars(tokenizer, vocabulary)
    prompters = Prompters(
        Prompter(
            tokenizer,
            info,
            vocabulary,
            defaults,
            grammars=grammars,
            chat_tokens=chat_tokens,
            thinking_budget=thinking_budget,
            whole=bool(embedder and embedder.both_ways),
            sight=tower,
        )
        for _ in range(PREPARED_AT_ONCE)
    )
    family = config["model_type"]
    engine = DecodingEngine(
        family, decoder, tokenizer, prompters.rows, info, max_rows, drafter, repeats=fixed
    )
    engine.contest = contest
    if tower is None:
        engine.tower_hint = tower_hint(config, model)
    if not embedder:
        engine.shapes = WarmUp(decoder, 1 if fixed else max_rows)
    if drafter == HEAD:
        engine.head = (head.origin or "the checkpoint") if head else None
        hint = head_hint(network, config, model, path)
        engine.head_hint = hint or assistant_hint(network, model, path)
    return engine


def describe(
    model: str, *, vision_from: str | None = None, max_pixels: int | None = None
) -> ModelInfo:
    """What a model is by its files, which are downloaded first but for the weights.

    Args:
        model, vision_from, max_pixels: see `load_engine`.

    Raises:
        ModelError: if its files cannot be used.
    """
    checkpoint = Original.find(model, "--model")
    path = checkpoint.folder
    try:
        config = load_config(path)
        tokenizer = read_tokenizer(path, config)
        embedder = read_embedder(path, config) if embeds(path) else None
        sees = Original.find(vision_from, VISION_FROM) if vision_from else checkpoint
        sight = read_sight(sees.folder, sees.config, max_pixels)
        info = _info(model, path, config, tokenizer, embedder, sight)
    except _UNUSABLE as error:
        raise _unusable("--model", path, error) from None
    return info if checkpoint.has_weights else info.model_copy(update={"system_fingerprint": None})


def _info(
    model: str,
    path: Path,
    config: Mapping[str, Any],
    tokenizer: TokenizerWrapper,
    embedder: Embedder | None,
    sight: Sight | None,
    draft_depth: int | None = None,
) -> ModelInfo:
    picture_tokens = sight.most if sight else 0
    return ModelInfo(
        model=model,
        context_length=context_length(config),
        longest_token=max(len(token) for token in tokenizer.get_vocab()),
        draft_depth=draft_depth,
        system_fingerprint=fingerprint_of(path, picture_tokens),
        chat_template=tokenizer.has_chat_template,
        vector_size=embedder.size if embedder else 0,
        markers=markers_of(tokenizer),
        picture_tokens=picture_tokens,
    )


def _require_checkpoint(path: Path, option: str) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"{option} {path}: no checkpoint, for it has no config.json; give another")


def _unusable(option: str, path: Path, error: Exception) -> ModelError:
    told = one_line(str(error))
    return ModelError(f"{option} {path}: the checkpoint cannot be loaded: {told}")


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens of a prompt and its answer, at most, by the config of a checkpoint."""
    text_config = config.get("text_config", config)
    known = (text_config[name] for name in CONTEXT_NAMES if text_config.get(name))
    return int(next(known, DEFAULT_CONTEXT))


def load(
    path: Path, option: str = "--model", graft: Graft | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load network, tokenizer and config from a directory; in float32 without a GPU.

    Args:
        option: that named the directory, for errors.
        graft: where its MTP head comes from; None for its own, if it has one.

    Raises:
        ModelError: if it cannot be loaded, or gets no head from there.
    """
    try:
        _require_checkpoint(path, option)
        if embeds(path):
            # Nothing is scored, so the network has no weights for that.
            network, config = load_model(
                path,
                model_config={"tie_word_embeddings": True},
                get_model_classes=lambda config: (
                    nested((kinds := _get_classes(config))[0]),
                    kinds[1],
                ),
            )
        else:
            network, config = load_model(path, get_model_classes=classes_with_head)
        tokenizer = read_tokenizer(path, config)
    except _UNUSABLE as error:
        raise _unusable(option, path, error) from None
    if graft is not None:
        graft.onto(network, config, tokenizer, path)
    elif fault := getattr(network, "head_fault", None):
        log.warning("the checkpoint's MTP head cannot be used (%s): no drafts", fault)
    if mx.default_device() == mx.cpu:
        network.set_dtype(mx.float32)
        mx.eval(network.parameters())
    if embeds(path):
        prepare(network)
    return network, tokenizer, config


def read_drafter(
    name: str, tokenizer: TokenizerWrapper, tell: Tell = lambda _: None
) -> MakeDrafter:
    """What makes the drafter of this name. A model that drafts is loaded now.

    Args:
        name: see `load_engine`.
        tokenizer: of the model that it drafts for.
        tell: told what is downloaded and read.

    Raises:
        ModelError: if a model cannot be loaded or its tokens have other ids.
    """
    if name in DRAFTERS:
        return DRAFTERS[name]
    try:
        path = resolve(name, DRAFTER, tell)
    except ModelError as error:
        raise ModelError(f"{error}, or give one of {', '.join(DRAFTERS)}") from None
    tell("reading the model that drafts")
    if is_assistant(path):
        return partial(drafter_of, name, load_assistant(path))
    network, other, _ = load(path, DRAFTER)
    require_same_tokens(name, tokenizer, other)
    return partial(drafter_of, name, network)


def _defaults(path: Path) -> Sampling:
    """What the checkpoint asks requests to sample with."""
    wishes = path / "generation_config.json"
    try:
        return sampling_defaults(json.loads(wishes.read_text()) if wishes.exists() else {})
    except ValueError as error:
        raise ModelError(f"--model {path}: {wishes.name} is not JSON: {error}") from None


def classes_with_head(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """mlx-lm's classes of a model and its arguments; the model's keeps its MTP head."""
    model_type = config["model_type"]
    if model_type.startswith("qwen3_5"):
        # A checkpoint saved without its vision tower names the text model, which mlx-lm does not.
        model_type = model_type.removesuffix("_text")
    model_class, args_class = _get_classes(config | {"model_type": model_type})
    return with_head(model_class), args_class


def decoder_of(
    network: nn.Module,
    max_rows: int,
    depth: int,
    make_drafter: MakeDrafter = own_head,
    lookup: int = 0,
    prefixes: int = 0,
    contest: Contest = HERE,
    embedder: Embedder | None = None,
    tower: Tower | None = None,
) -> RaggedDecoder:
    """The ragged batch of a model.

    Args:
        make_drafter: not called at depth 0.
        lookup, prefixes: see `load_engine`.
        contest: where forms of kernels compete; with fixed ones, the batch has fixed shapes.
        embedder: of a model that makes vectors.
        tower: of a model that takes pictures.

    Raises:
        ModelError: if it has no ragged form, or the drafter cannot draft for it.
    """
    kernels, drafts = for_device(contest), depth > 0 and make_drafter is own_head
    try:
        ragged = as_ragged(network, drafts=drafts, kernels=kernels, embedder=embedder, tower=tower)
    except Unsupported as reason:
        family = getattr(network, "model_type", type(network).__module__)
        raise ModelError(
            f"--model: this {family} cannot be decoded in a batch, because {reason}; "
            "give another, or serve it with mlx_lm.server"
        ) from None
    if depth:
        ragged.drafter = make_drafter(network, ragged, kernels)
    for part in ragged.slow_parts:
        log.warning("slow: %s", part)
    kept = partial(PrefixCache, LayerSpecs.of(ragged), prefixes) if prefixes else None
    slots = max_rows if contest.fixed else 0
    return RaggedDecoder(ragged, depth, lookup, kept, fixed=slots)
