"""Texts that the demo model samples, many at once, for its head to be distilled on."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5 import Qwen3_5TextModel

TEMPERATURES = (0.0, 0.6, 0.6, 1.0)
"""Of sampled rows, in turn."""
PREFIX, SAMPLED_LENGTH = 128, 320
"""Tokens of a corpus text before a sample, and with the sample."""


@torch.no_grad()
def sample(
    stock: Qwen3_5TextModel, prefixes: Tensor, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Continue prefixes [B, PREFIX] to SAMPLED_LENGTH tokens, each row at its temperature."""
    cache = DynamicCache(config=stock.config)
    rows, inputs = [prefixes], prefixes
    for _ in range(SAMPLED_LENGTH - PREFIX):
        output = stock(input_ids=inputs, past_key_values=cache, use_cache=True)
        logits = F.linear(output.last_hidden_state[:, -1], stock.embed_tokens.weight).float()
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        inputs = (logits - temperatures[:, None] * noise).argmax(-1, keepdim=True)
        rows.append(inputs)
    return torch.cat(rows, dim=1).to(torch.int16)


def row_temperatures(rows: int, device: torch.device) -> Tensor:
    return torch.tensor(TEMPERATURES, device=device).repeat(-(-rows // len(TEMPERATURES)))[:rows]
