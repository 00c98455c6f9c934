"""The gated delta rule by mlx-lm's own function."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from omlx_worker.engine.kernels.delta_rule import Inputs, Kept


@dataclass(frozen=True)
class PlainRule:
    """The `DeltaRule` that calls mlx-lm: twice a window, once a stretch of a prompt."""

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        lead, mask = window.at(slice(1)), None
        if kept is not None:
            depth = kept.keys.shape[1] - 1
            drafts = [part[:, 1:] for part in kept]
            # A replay's outputs are not read, so its keys stand in for queries.
            pairs = zip(Inputs(drafts[0], *drafts), lead, strict=True)
            lead = Inputs(*(mx.concatenate(list(pair), axis=1) for pair in pairs))
            mask = mx.arange(depth + 1) < accepted[:, None]
            mask = mask | (mx.arange(depth + 1) == depth)
        out, state = _update(*lead, state, mask)
        out = out[:, -1:]
        if window.keys.shape[1] > 1:
            rest, _ = _update(*window.at(slice(1, None)), state, None)
            out = mx.concatenate([out, rest], axis=1)
        return out, state

    def read(
        self, prompt: Inputs, _log_decay: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        return _update(*prompt, state, None)


def _update(*arguments: mx.array | None) -> tuple[mx.array, mx.array]:
    """mlx-lm's kernel on Metal where it takes the keys, else its loop of operations."""
    queries = arguments[0]
    on_metal = mx.default_device() == mx.gpu and mx.metal.is_available()
    fits = on_metal and queries is not None and queries.shape[-1] % 32 == 0
    out: tuple[mx.array, mx.array] = (gated_delta_kernel if fits else gated_delta_ops)(*arguments)
    return out
