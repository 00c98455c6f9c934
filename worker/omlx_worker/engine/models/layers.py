"""The layers of the Qwen3.5 family over a ragged window: what mlx-lm computes, row by row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.delta_rule import Kept
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.net_inputs import Projected
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.ragged_model import LayerCache
from omlx_worker.engine.models.rotary import heads_of
from omlx_worker.engine.models.served_layers import copied, serve_products


class Layer:
    """A decoder layer: attention or a gated delta net, then an MLP.

    Attributes:
        module: mlx-lm's, whose weights and norms it uses.
    """

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self.module = module
        self._mixer: Attention | DeltaNet
        if module.is_linear:
            self._mixer = DeltaNet(module.linear_attn, kernels)
        else:
            self._mixer = Attention(module.self_attn, kernels)
        self._mlp = MLP(module.mlp, kernels)

    def __call__(
        self, x: mx.array, cache: LayerCache, window: Window, accepted: mx.array | None
    ) -> mx.array:
        """Run one window, ``[S, W, hidden]`` in and out.

        Args:
            accepted: ``[S]`` int32, drafts accepted of each row's last window; only a gated
                delta net reads it, in a step.
        """
        normed = self.module.input_layernorm(x)
        if isinstance(self._mixer, Attention):
            assert isinstance(cache, AttentionCache)
            x = self._mixer(normed, cache, window, x)
        else:
            assert isinstance(cache, RecurrentCache)
            assert accepted is not None
            x = self._mixer(normed, cache, window, accepted, x)
        return self._mlp(self.module.post_attention_layernorm(x), x)


class MLP:
    """An MLP, dense or a mixture of experts."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = copied(module)
        self._opened = None
        if type(module) is Qwen3NextMLP:
            self._opened = kernels.fuse([module.gate_proj, module.up_proj], gated=True)
            self._down = kernels.product(module.down_proj)
        else:
            for part in self._module.modules():
                serve_products(part, kernels)

    def __call__(self, x: mx.array, added: mx.array) -> mx.array:
        """``[S, W, hidden]`` in and out, added to the residual stream ``added``."""
        if self._opened is None:
            out: mx.array = self._module(x)
            return added + out
        return self._down(self._opened(x), added)


class Attention:
    """Gated full attention of a window; mlx-lm's `Qwen3NextAttention`."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._heads = heads_of(module, gated=True)
        self._into = kernels.joined([module.q_proj, module.k_proj, module.v_proj])
        self._out = kernels.product(module.o_proj)

    def __call__(
        self, x: mx.array, cache: AttentionCache, window: Window, added: mx.array
    ) -> mx.array:
        """``[S, W, hidden]`` in and out, added to the residual stream ``added``."""
        module, heads = self._module, self._heads
        slots, width, _ = x.shape
        projected = self._into(x)
        queries = cache.prepare(projected, heads, window)
        mixed = cache.attend(queries, window, module.scale).swapaxes(1, 2)
        asked = projected[..., : heads.queries * heads.apart]
        gate = asked.reshape(slots, width, heads.queries, heads.apart)[..., heads.size :]
        return self._out((mixed * mx.sigmoid(gate)).reshape(slots, width, -1), added)


class DeltaNet:
    """A recurrent layer; mlx-lm's `GatedDeltaNet` or `Qwen3NextGatedDeltaNet`."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._rule = kernels.rule
        self._inputs = kernels.net(module)
        self._out = kernels.product(module.out_proj)

    def __call__(
        self,
        x: mx.array,
        cache: RecurrentCache,
        window: Window,
        accepted: mx.array,
        added: mx.array,
    ) -> mx.array:
        """Run one window, ``[S, W, hidden]`` in and out, added to the residual stream ``added``."""
        projected = self._inputs.project(x)
        if window.lengths is None:
            out = self._step(projected, cache, accepted)
        else:
            out = self._read(projected, cache, window.lengths)
        return self._out(self._inputs.gated(out, projected), added)

    def _step(self, projected: Projected, cache: RecurrentCache, accepted: mx.array) -> mx.array:
        """Run a window of drafts; its outputs ``[S, W, H, Dv]``.

        The accepted drafts of the last window are replayed from their kept inputs. This window's
        first token is always committed, so the cache keeps the state after it. The drafts behind
        it run from there, and their state is dropped.
        """
        past, kept = (cache.kept[0], Kept(*cache.kept[1:])) if cache.kept else (None, None)
        conv, state = cache.states
        window, conv = self._inputs.prepare(projected, conv, past, accepted)
        out, state = self._rule.replay_and_run(window, kept, accepted, state)
        cache.states = [conv, state]
        cache.kept = [projected[0], *window.kept]
        return out

    def _read(self, projected: Projected, cache: RecurrentCache, lengths: mx.array) -> mx.array:
        """Run a window of prompts, all committed. Padding does not change a state.

        Args:
            lengths: ``[S]`` int32, each row's tokens of the window.
        """
        conv, state = cache.states
        prompt, _ = self._inputs.prepare(projected, conv, None, None)
        runs = (mx.arange(prompt.keys.shape[1]) < lengths[:, None])[..., None]
        log_decay = mx.where(runs, self._inputs.log_decay(projected), 0)
        decay, beta = mx.where(runs, prompt.decay, 1), mx.where(runs, prompt.beta, 0)
        prompt = prompt._replace(decay=decay, beta=beta)
        out, state = self._rule.read(prompt, log_decay, state)
        cache.states = [_inputs_until(lengths, conv, projected[0]), state]
        return out


def _inputs_until(lengths: mx.array, conv: mx.array, inputs: mx.array) -> mx.array:
    """The convolution's last inputs ``[B, taps, channels]`` of rows that end after ``lengths``.

    Args:
        conv: its last inputs before this stretch, ``[B, taps, channels]``.
        inputs: those of the stretch, ``[B, T, channels or more]``.
    """
    taps, channels = conv.shape[1:]
    whole = mx.concatenate([conv, inputs[..., :channels]], axis=1)
    index = lengths[:, None] + mx.arange(taps)
    return mx.take_along_axis(whole, index[..., None], axis=1)
