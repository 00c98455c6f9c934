"""Acceptance of the demo model's drafts on held-out prompts, on MLX, from the saved checkpoint.

The backbone is mlx-lm's, the head is put together here from mlx-lm's layers: neither the trainer's
classes nor the worker's engine are used. Float32, greedy.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

NEW_TOKENS = 128


class MtpHead(nn.Module):
    """The head of a Qwen3.5 checkpoint; see `demo_model_net.MtpHead`."""

    def __init__(self, args: TextModelArgs) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [DecoderLayer(args, args.full_attention_interval - 1)]
        self.norm = nn.RMSNorm(width, eps=eps)

    def __call__(
        self, hidden: mx.array, next_embedding: mx.array, mask: mx.array | str, cache: object
    ) -> mx.array:
        normed = self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)
        return self.norm(self.layers[0](self.fc(mx.concatenate(normed, axis=-1)), mask, cache))


class SecondApplication:
    """A cache for the head's second application to every slot at once.

    Slot t of it takes position t + 1, and sees the first application's slots up to t and itself.
    """

    offset = 1

    def __init__(self, first: KVCache) -> None:
        self.first = first

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        first_keys, first_values = self.first.keys_and_values()
        return (
            mx.concatenate([first_keys, keys], axis=2),
            mx.concatenate([first_values, values], axis=2),
        )

    @staticmethod
    def mask(length: int) -> mx.array:
        causal = mx.tril(mx.ones((length, length), dtype=mx.bool_))
        return mx.concatenate([causal, mx.eye(length, dtype=mx.bool_)], axis=1)


@dataclass
class Drafts:
    """Drafts offered and accepted; a second draft is offered where the first was accepted."""

    first: int = 0
    first_accepted: int = 0
    second: int = 0
    second_accepted: int = 0

    def __str__(self) -> str:
        return (
            f"first draft {self.first_accepted / max(1, self.first):.4f} of {self.first}, "
            f"second {self.second_accepted / max(1, self.second):.4f} of {self.second}"
        )


def load_head(folder: Path, args: TextModelArgs) -> MtpHead:
    """The head of a checkpoint in the raw convention, in which norms are stored minus one."""
    head = MtpHead(args)
    weights = {
        name.removeprefix("mtp."): weight.astype(mx.float32) + (1.0 if weight.ndim == 1 else 0.0)
        for name, weight in mx.load(str(folder / "model.safetensors")).items()
        if name.startswith("mtp.")
    }
    head.load_weights(list(weights.items()))
    return head


def states(
    backbone: nn.Module, head: MtpHead, tokens: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Normed states of the backbone and of the head's two applications at every slot t.

    They score token t + 1, t + 2 and t + 3. Each application is given the text's own token, so the
    second is what it would be if the first's draft had been accepted. Shapes [1, T], T - 1, T - 2.
    """
    hidden, embedded = backbone(tokens), backbone.embed_tokens(tokens)
    cache = KVCache()
    first = head(hidden[:, :-1], embedded[:, 1:], "causal", cache)
    cache.trim(1)  # the last slot has no token left for the second application
    second = head(
        first[:, :-1],
        embedded[:, 2:],
        SecondApplication.mask(cache.offset),
        SecondApplication(cache),
    )
    return hidden, first, second


def evaluate(folder: Path) -> None:
    """Print, for every prompt and over all, how many drafts greedy decoding accepts."""
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    head, backbone = load_head(folder, model.language_model.args), model.language_model.model
    total, varied = Drafts(), Drafts()
    for line in (folder / "heldout.jsonl").read_text("utf-8").splitlines():
        prompt = json.loads(line)
        ids = tokenizer.encode(prompt["prompt"])
        steps = generate_step(mx.array(ids), model, max_tokens=NEW_TOKENS)
        text = list(ids)
        for token, _logprobs in steps:
            text.append(int(token))
            if text[-1] in tokenizer.eos_token_ids:
                break
        _hidden, *of_head = states(backbone, head, mx.array(text)[None])
        first, second = (
            mx.argmax(backbone.embed_tokens.as_linear(state[0]), axis=-1).tolist()
            for state in of_head
        )

        here = Drafts()
        for target in range(len(ids) + 1, len(text)):
            here.first += 1
            if first[target - 2] == text[target]:
                here.first_accepted += 1
                if target + 1 < len(text):
                    here.second += 1
                    here.second_accepted += second[target - 2] == text[target + 1]
        loops = repeats_itself(text[len(ids) :])
        for drafts in (total, varied) if not loops else (total,):
            for field, count in vars(here).items():
                setattr(drafts, field, getattr(drafts, field) + count)
        print(f"{prompt['id']}: {here}{' (loops)' if loops else ''}", flush=True)
    print(f"all prompts: {total}")
    print(f"texts that do not loop: {varied}")


def repeats_itself(tokens: list[int], window: int = 16) -> bool:
    """Whether a text's last `window` tokens occur earlier in it."""
    last = tokens[-window:]
    earlier = (tokens[start : start + window] for start in range(len(tokens) - window))
    return any(piece == last for piece in earlier)
