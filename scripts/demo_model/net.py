"""The demo model in PyTorch: transformers' Qwen3.5 text model and an MTP head beside it.

Shapes: B sequences, T positions, H heads, D the width of a head, N chunks, C positions in a chunk.
"""

import copy
import math
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

DEPTH_WEIGHTS = (1.0, 0.5, 0.25)
"""The loss on t+1, on the head's t+2, and on the t+3 of the head's second application."""


def unit_triangular_inverse(matrix: Tensor) -> Tensor:
    """Invert lower triangular matrices with ones on their diagonal. [..., C, C], C a power of two.

    Inverted blocks are joined two by two, inv([[A, 0], [B, D]]) = [[A', 0], [-D' B A', D']], as
    products of whole matrices. The last line is one Newton step: it removes rounding, and it is
    the one line that gradients need to pass, its derivative being the inverse's own.
    """
    size = matrix.shape[-1]
    position = torch.arange(size, device=matrix.device)
    with torch.no_grad():
        inverse = torch.eye(size, device=matrix.device).expand_as(matrix)
        for level in range(int(math.log2(size))):
            block = position >> level
            joint = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
            inverse = inverse - inverse @ (matrix * joint) @ inverse
    return 2 * inverse - inverse @ (matrix @ inverse)


def scan_states(decay: Tensor, update: Tensor) -> Tensor:
    """The state before each chunk of S <- decay @ S + update, from S = 0. [..., N, D, D] each.

    A parallel prefix: chunks are composed with those 1, 2, 4, ... before them.
    """
    chunks, reach = update.shape[-3], 1
    while reach < chunks:
        late, early = decay[..., reach:, :, :], (..., slice(None, -reach), slice(None), slice(None))
        update = torch.cat(
            [update[..., :reach, :, :], update[..., reach:, :, :] + late @ update[early]], dim=-3
        )
        decay = torch.cat([decay[..., :reach, :, :], late @ decay[early]], dim=-3)
        reach *= 2
    return F.pad(update[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464), chunked, in float32. T a multiple of `chunk`.

    Args: query, key, value [B, T, H, D]; log_decay, beta [B, T, H]. Returns [B, T, H, D].
    """
    query, key, value, log_decay, beta = (
        x.float().transpose(1, 2).unflatten(2, (-1, chunk))
        for x in (query, key, value, log_decay, beta)
    )  # [B, H, N, C, D] and [B, H, N, C]
    query, key = F.normalize(query, dim=-1) * query.shape[-1] ** -0.5, F.normalize(key, dim=-1)
    beta = beta[..., None]

    total = log_decay.cumsum(-1)[..., None]  # since the chunk's start
    end = total[..., -1:, :]
    pairwise = (total - total.mT).clamp(max=0).exp().tril()

    eye = torch.eye(chunk, device=query.device)
    system = torch.tril((beta * key) @ key.mT * pairwise, -1) + eye
    inverse = unit_triangular_inverse(system)
    written = inverse @ (beta * value)
    erased = inverse @ (beta * key * total.exp())

    kept = (key * (end - total).exp()).mT
    state_eye = torch.eye(key.shape[-1], device=query.device)
    states = scan_states(end.exp() * state_eye - kept @ erased, kept @ written)
    output = query * total.exp() @ states + (query @ key.mT * pairwise) @ (
        written - erased @ states
    )
    return output.flatten(2, 3).transpose(1, 2)


class GatedDeltaNet(Qwen3_5GatedDeltaNet):
    """transformers' layer, its parameters and names, with a forward made for training.

    No cache and no padding; the convolution is a sum of shifts, which compiles into one kernel.
    """

    def __init__(self, config: Qwen3_5TextConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.config = config
        self.reset_gates()

    @torch.no_grad()
    def reset_gates(self) -> None:
        """Spread the heads' memories over 2 to 1,000 tokens (Mamba2's initialisation)."""
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus's inverse
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1, 8).log())

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        batch, length, _width = hidden_states.shape
        mixed = self.in_proj_qkv(hidden_states)
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)  # [channels, taps], the last one is now
        reach = self.conv_kernel_size - 1
        padded = F.pad(mixed, (0, 0, reach, 0))
        mixed = F.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(reach + 1)))

        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        groups = self.num_v_heads // self.num_k_heads
        query, key = (
            x.unflatten(-1, (-1, self.head_k_dim)).repeat_interleave(groups, dim=2)
            for x in (query, key)
        )
        log_decay = -self.A_log.float().exp() * F.softplus(
            self.in_proj_a(hidden_states).float() + self.dt_bias
        )
        with torch.autocast(hidden_states.device.type, enabled=False):
            output = gated_delta_rule(
                query,
                key,
                value.unflatten(-1, (-1, self.head_v_dim)),
                log_decay,
                self.in_proj_b(hidden_states).float().sigmoid(),
            )
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        output = self.norm(output.reshape(-1, self.head_v_dim).to(mixed.dtype), gate)
        return self.out_proj(output.reshape(batch, length, -1))


class FirstApplication:
    """Keys and values of the head's first application, in the place of a cache.

    The second application's query at slot t sees what it sees at inference: the first
    application's slots up to t, and its own.
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if self.kept is None:
            self.kept = keys, values
            return keys, values
        first_keys, first_values = self.kept
        return torch.cat([first_keys, keys], dim=2), torch.cat([first_values, values], dim=2)


def second_application_mask(length: int, device: torch.device) -> Tensor:
    """True where the second application attends: [1, 1, T, 2T], causal beside a diagonal."""
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([square.tril(), own], dim=1)[None, None]


class MtpHead(nn.Module):
    """Multi-token prediction: from the state at t and the token at t+1 to a state for t+2."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        full_attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full_attention)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor, next_embedding: Tensor, **attention: object) -> Tensor:
        """Args: the backbone's normed state, or this head's own output, and embed(token t+1).

        Both are [B, T, hidden]. Returns the head's normed state, for the shared lm_head.
        """
        normed = self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)
        return self.norm(self.layers[0](self.fc(torch.cat(normed, dim=-1)), **attention))


def token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the tied lm_head over [B, T] targets."""
    logits = F.linear(hidden, embedding).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten())


class DemoModel(nn.Module):
    """The backbone under `language_model`, the head under `mtp`, as a checkpoint names them."""

    def __init__(self, text_config: dict[str, object]) -> None:
        super().__init__()
        config = Qwen3_5TextConfig(**copy.deepcopy(text_config), attn_implementation="sdpa")
        self.language_model = Qwen3_5TextModel(config)
        for index, layer in enumerate(self.language_model.layers):
            if config.layer_types[index] == "linear_attention":
                layer.linear_attn = GatedDeltaNet(config, index)
        self.mtp = MtpHead(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    @classmethod
    def from_checkpoint(cls, text_config: dict[str, object], folder: Path) -> Self:
        """The model that `checkpoint` was saved of, in float32."""
        model, published = cls(text_config), load_file(folder / "model.safetensors")
        model.load_state_dict(
            {name.removeprefix("model."): weight.float() for name, weight in published.items()}
        )
        return model

    def forward(self, tokens: Tensor, loss: object = token_loss) -> Tensor:
        """Losses on t+1, t+2 and t+3, [3], over sequences of T + 3 tokens, [B, T + 3].

        The head's slot t holds the pair (state at t, token t+1) and takes position t, that of the
        state; its second application at slot t takes position t+1, the slot it has at inference.
        """
        backbone, length = self.language_model, tokens.shape[1] - 3
        embedding = backbone.embed_tokens.weight
        embedded = backbone.embed_tokens(tokens)
        positions = torch.arange(length + 1, device=tokens.device)[None, None].expand(3, 1, -1)
        cos, sin = backbone.rotary_emb(embedded, positions)

        hidden = backbone(inputs_embeds=embedded[:, :length], use_cache=False).last_hidden_state
        first_application = FirstApplication()
        first = self.mtp(
            hidden,
            embedded[:, 1 : length + 1],
            position_embeddings=(cos[:, :length], sin[:, :length]),
            past_key_values=first_application,
        )
        second = self.mtp(
            first,
            embedded[:, 2 : length + 2],
            position_embeddings=(cos[:, 1:], sin[:, 1:]),
            past_key_values=first_application,
            attention_mask=second_application_mask(length, tokens.device),
        )
        return torch.stack(
            [
                loss(state, embedding, tokens[:, depth : depth + length])
                for depth, state in enumerate((hidden, first, second), start=1)
            ]
        )

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights in bfloat16 under the names of a published Qwen3.5 checkpoint.

        A norm's weight, which is stored minus one, is rounded so that one plus it is a bfloat16
        too: some loaders, mlx-lm's among them, add the one in bfloat16.
        """
        norms = {
            f"{name}.weight"
            for name, module in self.named_modules()
            if isinstance(module, Qwen3_5RMSNorm)
        }
        weights = {}
        for name, weight in self.state_dict().items():
            if name in norms:
                weight = (1 + weight).bfloat16().float() - 1
            published = name.replace("language_model.", "model.language_model.", 1)
            weights[published] = weight.detach().to("cpu", torch.bfloat16).contiguous()
        return weights
