"""Texts that the demo model samples, many at once, for its head to be trained on."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5 import Qwen3_5TextModel

from scripts.demo_model.net import DemoModel

TEMPERATURES = (0.0, 0.6, 0.6, 1.0)
"""Of sampled rows, in turn."""
PREFIX, SAMPLED_LENGTH = 128, 320
"""Tokens of a corpus text before a sample, and with the sample."""


class Sampler:
    """Continues pieces of a text with transformers' own layers, which have a cache.

    `places` draws where the pieces start; the tokens are drawn by a generator on the device.
    """

    def __init__(self, model: DemoModel, seed: int) -> None:
        self.device = model.language_model.embed_tokens.weight.device
        self.places = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.stock = Qwen3_5TextModel(copy.deepcopy(model.language_model.config)).eval()
        self.stock.to(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)

    def __call__(self, model: DemoModel, source: Tensor, count: int) -> Tensor:
        """Texts [count, SAMPLED_LENGTH] of the model as it is now, after pieces of `source`."""
        self.stock.load_state_dict(model.language_model.state_dict())
        starts = torch.randint(len(source) - PREFIX, (count, 1), generator=self.places)
        places = (starts + torch.arange(PREFIX)).to(source.device)
        prefixes = source[places].to(self.device).long()
        return sample(self.stock, prefixes, row_temperatures(count, self.device), self.generator)


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
