"""The reading model for training: Qwen3-VL's arithmetic for gray pictures of one size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.reading_model.files import TEXT_CONFIG, VISION_CONFIG

PATCH, MERGE = VISION_CONFIG["patch_size"], VISION_CONFIG["spatial_merge_size"]
COPIES = VISION_CONFIG["in_channels"] * VISION_CONFIG["temporal_patch_size"]
"""Of a gray pixel before the tower's convolution: colours, and the two frames of a picture."""


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn x [B, heads, N, D] by angles [N, D / 2] or [B, 1, N, D / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = rotate(q, angles) * q.shape[-1] ** -0.5 @ rotate(k, angles).transpose(-1, -2)
        x = scores.softmax(-1).to(v.dtype) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class VisionMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.attn = VisionAttention(width, heads)
        self.mlp = VisionMLP(width, inner)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches of a square to one vector; deepstack's norm comes after they are joined."""

    def __init__(self, width: int, out: int, after: bool) -> None:
        super().__init__()
        self.after, joined = after, width * MERGE**2
        self.norm = nn.LayerNorm(joined if after else width, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, out)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.after else self.norm(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1] * MERGE**2)
        x = self.norm(x) if self.after else x
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    """Gray patches [B, N, PATCH**2]; the weight is the sum of the convolution's over its copies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(PATCH**2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def in_blocks(x: Tensor) -> Tensor:
    """Patches [..., rows, columns, C] to [..., rows * columns, C], a square's four together."""
    *first, rows, columns, width = x.shape
    x = x.reshape(*first, rows // MERGE, MERGE, columns // MERGE, MERGE, width)
    return x.transpose(-4, -3).reshape(*first, rows * columns, width)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c = VISION_CONFIG
        self.width, self.heads = c["hidden_size"], c["num_heads"]
        self.deep = c["deepstack_visual_indexes"]
        self.patch_embed = PatchEmbed(self.width)
        self.pos_embed = nn.Embedding(c["num_position_embeddings"], self.width)
        self.blocks = nn.ModuleList(
            VisionBlock(self.width, self.heads, c["intermediate_size"]) for _ in range(c["depth"])
        )
        self.merger = Merger(self.width, c["out_hidden_size"], after=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(self.width, c["out_hidden_size"], after=True) for _ in self.deep
        )

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Gray pixels [B, H, W] between -1 and 1 to vectors [B, N, out], and deepstack's."""
        batch, height, width = pixels.shape
        rows, columns = height // PATCH, width // PATCH
        x = pixels.view(batch, rows, PATCH, columns, PATCH).transpose(2, 3)
        x = self.patch_embed(in_blocks(x.reshape(batch, rows, columns, PATCH**2)))
        side = math.isqrt(self.pos_embed.num_embeddings)
        places = self.pos_embed.weight.T.view(1, self.width, side, side)
        places = F.interpolate(places, (rows, columns), mode="bilinear", align_corners=True)
        x = x + in_blocks(places[0].permute(1, 2, 0))
        quarter = self.width // self.heads // 4
        frequencies = 10000 ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = in_blocks(torch.stack((row, column), -1))[..., None] * frequencies
        deep = []
        for number, block in enumerate(self.blocks):
            x = block(x, angles.flatten(-2))
            if number in self.deep:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return [self.merger(x), *deep]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, TEXT_CONFIG["rms_norm_eps"])


Keys = tuple[Tensor, Tensor]


class TextAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c = TEXT_CONFIG
        self.width = c["head_dim"]
        queries = c["num_attention_heads"] * self.width
        keys = c["num_key_value_heads"] * self.width
        self.q_proj = nn.Linear(c["hidden_size"], queries, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], keys, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], keys, bias=False)
        self.o_proj = nn.Linear(queries, c["hidden_size"], bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.width), RMSNorm(self.width)

    def forward(self, x: Tensor, angles: Tensor, earlier: Keys | None) -> tuple[Tensor, Keys]:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.width)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(y.transpose(1, 2), angles) for y in (self.q_norm(q), self.k_norm(k)))
        v = v.transpose(1, 2)
        if earlier:
            k, v = (
                torch.cat((old.expand(batch, -1, -1, -1), new), 2)
                for old, new in zip(earlier, (k, v), strict=True)
            )
        groups = q.shape[1] // k.shape[1]
        scores = q * self.width**-0.5 @ k.repeat_interleave(groups, 1).transpose(-1, -2)
        hidden = torch.ones(length, k.shape[2], dtype=torch.bool).triu(k.shape[2] - length + 1)
        x = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
        x = x @ v.repeat_interleave(groups, 1)
        return self.o_proj(x.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class TextMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, inner = TEXT_CONFIG["hidden_size"], TEXT_CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = TextAttention(), TextMLP()
        self.input_layernorm = RMSNorm(TEXT_CONFIG["hidden_size"])
        self.post_attention_layernorm = RMSNorm(TEXT_CONFIG["hidden_size"])

    def forward(self, x: Tensor, angles: Tensor, earlier: Keys | None) -> tuple[Tensor, Keys]:
        added, keys = self.self_attn(self.input_layernorm(x), angles, earlier)
        x = x + added
        return x + self.mlp(self.post_attention_layernorm(x)), keys


def text_angles(positions: Tensor) -> Tensor:
    """Positions [3, N] (time, height, width) to angles [N, head_dim / 2], interleaved."""
    half = TEXT_CONFIG["head_dim"] // 2
    frequencies = TEXT_CONFIG["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
    which = torch.zeros(half, dtype=torch.long)
    for axis in (1, 2):
        which[axis : 3 * TEXT_CONFIG["rope_scaling"]["mrope_section"][axis] : 3] = axis
    return positions[which].T * frequencies


def positions_of(before: int, rows: int, columns: int, after: int) -> Tensor:
    """Positions [3, N]: `before` tokens, a picture of rows x columns vectors, `after` tokens."""
    picture = torch.stack(
        torch.meshgrid(torch.arange(1), torch.arange(rows), torch.arange(columns), indexing="ij")
    ).flatten(1)
    start = before + max(rows, columns)
    first, last = torch.arange(before), torch.arange(start, start + after)
    return torch.cat((first.expand(3, -1), picture + before, last.expand(3, -1)), 1)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT_CONFIG["vocab_size"], TEXT_CONFIG["hidden_size"])
        self.layers = nn.ModuleList(TextLayer() for _ in range(TEXT_CONFIG["num_hidden_layers"]))
        self.norm = RMSNorm(TEXT_CONFIG["hidden_size"])

    def forward(self, prefix: Tensor, seen: list[Tensor], rows: int, tokens: Tensor) -> Tensor:
        """States [B, N, C] of tokens [B, N] behind pictures, which come after one prefix."""
        before, count = len(prefix), seen[0].shape[1]
        angles = text_angles(positions_of(before, rows, count // rows, tokens.shape[1]))
        first = self.embed_tokens(prefix)[None]
        x = torch.cat((seen[0], self.embed_tokens(tokens)), 1)
        for number, layer in enumerate(self.layers):
            first, keys = layer(first, angles[:before], None)
            x, _ = layer(x, angles[before:], keys)
            if number + 1 < len(seen):
                x = x + F.pad(seen[number + 1], (0, 0, 0, tokens.shape[1]))
        return self.norm(x[:, count:])


class ReadingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.language_model = Tower(), Text()

    def write(self, seen: list[Tensor], prefix: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of tokens [B, N] behind the vectors of pictures of one row."""
        states = self.language_model(prefix, seen, 1, tokens)
        return states @ self.language_model.embed_tokens.weight.T

    def checkpoint(self) -> dict[str, Tensor]:
        """Weights by Qwen3-VL's names, bfloat16, the convolution's spread over its copies."""
        weights = {f"model.{name}": weight.bfloat16() for name, weight in self.state_dict().items()}
        name = "model.visual.patch_embed.proj.weight"
        flat = self.visual.patch_embed.proj.weight.view(-1, 1, 1, PATCH, PATCH) / COPIES
        shape = VISION_CONFIG["in_channels"], VISION_CONFIG["temporal_patch_size"]
        weights[name] = flat.expand(-1, *shape, -1, -1).bfloat16().contiguous()
        return weights
