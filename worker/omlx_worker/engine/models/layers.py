"""The decoder layers of Qwen3.5 and Qwen3-Next over a ragged window, and of their MTP heads.

They compute what mlx-lm's do, row by row. Of mlx-lm's modules they use the weights, the norms, the
experts and the rotations. Attention, the gated delta net and dense MLPs are this project's own:
their parts run as kernels, and the residual stream is added by the products.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextMLP

from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.kernels.delta_rule import Kept
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.net_inputs import Projected
from omlx_worker.engine.models.layer_view import LayerView, add_forward
from omlx_worker.engine.models.recurrent_view import RecurrentView
from omlx_worker.engine.models.rotary import heads_of


def serve_layers(model: nn.Module, kernels: Kernels) -> bool:
    """Get a copied model's layers ready to run with views as their caches.

    The copies lose the modules that these layers run in their own form.

    Returns:
        Whether it has such layers.
    """
    served = [part for part in model.modules() if isinstance(part, _SERVED)]
    for part in served:
        part._layer = Layer(part, kernels)
        add_forward(type(part), _run)
    return bool(served)


_SERVED = (DecoderLayer, Qwen3NextDecoderLayer)


def _run(module: Any, x: mx.array, _mask: Any, view: LayerView | RecurrentView) -> mx.array:
    layer: Layer = module._layer
    return layer(x, view)


class Layer:
    """A decoder layer: attention or a gated delta net, then an MLP."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._mixer: Attention | DeltaNet
        if module.is_linear:
            self._mixer = DeltaNet(module.pop("linear_attn"), kernels)
        else:
            self._mixer = Attention(module.pop("self_attn"), kernels)
        self._mlp = MLP(module.mlp, kernels)
        if self._mlp.is_own:
            del module["mlp"]

    def __call__(self, x: mx.array, view: LayerView | RecurrentView) -> mx.array:
        """Run one window, ``[S, W, hidden]`` in and out."""
        normed = self._module.input_layernorm(x)
        if isinstance(self._mixer, Attention):
            assert isinstance(view, LayerView)
            x = self._mixer(normed, view, x)
        else:
            assert isinstance(view, RecurrentView)
            x = self._mixer(normed, view, x)
        return self._mlp(self._module.post_attention_layernorm(x), x)


class MLP:
    """An MLP, dense or a mixture of experts."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._opened = None
        if type(module) is Qwen3NextMLP:
            self._opened = kernels.fuse([module.gate_proj, module.up_proj], gated=True)
            self._down = kernels.product(module.down_proj)

    @property
    def is_own(self) -> bool:
        """Whether it runs without the module's own forward."""
        return self._opened is not None

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

    def __call__(self, x: mx.array, view: LayerView, added: mx.array) -> mx.array:
        """``[S, W, hidden]`` in and out, added to the residual stream ``added``."""
        module, heads, cache, window = self._module, self._heads, view.cache, view.window
        slots, width, _ = x.shape
        projected = self._into(x)
        queries = cache.prepare(projected, heads, window)
        mixed = cache.attend(queries, window, module.scale).swapaxes(1, 2)
        asked = projected[..., : heads.queries * heads.stride]
        gate = asked.reshape(slots, width, heads.queries, heads.stride)[..., heads.size :]
        return self._out((mixed * mx.sigmoid(gate)).reshape(slots, width, -1), added)


class DeltaNet:
    """A recurrent layer; mlx-lm's `GatedDeltaNet` or `Qwen3NextGatedDeltaNet`."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._rule = kernels.rule
        self._inputs = kernels.net(module)
        self._out = kernels.product(module.out_proj)

    def __call__(self, x: mx.array, view: RecurrentView, added: mx.array) -> mx.array:
        """Run one window, ``[S, W, hidden]`` in and out, added to the residual stream ``added``."""
        projected = self._inputs.project(x)
        if view.window.lengths is None:
            out = self._step(projected, view.cache, view.accepted)
        else:
            out = self._read(projected, view.cache, view.window.lengths)
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
