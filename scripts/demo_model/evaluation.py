"""Acceptance of the demo model's drafts on held-out prompts, on MLX, from the saved checkpoint.

The backbone is mlx-lm's, the head is put together here from mlx-lm's layers: neither the trainer's
classes nor the worker's engine are used. Float32; greedy, and sampling where a draft is accepted
with probability min(1, p/q).
"""

import json
import operator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import batch_generate, load
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

NEW_TOKENS, BATCH, SEED = 128, 8, 20
TEMPERATURES = (0.0, 0.6)


class MtpHead(nn.Module):
    """The head of a Qwen3.5 checkpoint; see `net.MtpHead`."""

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
    """Drafts offered and accepted; a second draft is offered where the first was accepted.

    A draft of sampling counts as accepted in part, by the probability that it would be.
    """

    first: float = 0
    first_accepted: float = 0
    second: float = 0
    second_accepted: float = 0

    @property
    def share(self) -> float:
        return self.first_accepted / max(1, self.first)

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        return (
            f"first draft {self.share:.4f} of {self.first:.0f}, "
            f"second {self.second_accepted / max(1, self.second):.4f} of {self.second:.0f}"
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
    second is what it would be if the first's draft had been accepted. Shapes [B, T], T - 1, T - 2.
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


def agreement(drafted: mx.array, wanted: mx.array, temperature: float) -> mx.array:
    """The probability that a draft is accepted: sum(min(p, q)); greedy, whether they agree.

    Logits [..., vocabulary] of the head and of the backbone for the same tokens; returns [...].
    """
    if temperature == 0:
        return mx.argmax(drafted, axis=-1) == mx.argmax(wanted, axis=-1)
    p, q = (mx.softmax(logits / temperature, axis=-1) for logits in (wanted, drafted))
    return mx.minimum(p, q).sum(-1)


def drafts_of(first: list[float], second: list[float], start: int, end: int) -> Drafts:
    """What becomes of drafts for a text's tokens from place `start` to `end`.

    Args: the agreement of the first and of the second draft at every slot; slot t of the first is
    about token t + 2, of the second about t + 3.
    """
    found = Drafts()
    for target in range(start, end):
        accepted = first[target - 2]
        found += Drafts(1, accepted)
        if target + 1 < end:
            found += Drafts(second=accepted, second_accepted=accepted * second[target - 2])
    return found


def drafts_over(
    model: nn.Module,
    head: MtpHead,
    prompts: list[list[int]],
    own: list[list[int]],
    temperature: float,
) -> list[Drafts]:
    """What becomes of drafts for texts, each the model's own continuation of a prompt."""
    backbone = model.language_model.model
    texts = [prompt + text for prompt, text in zip(prompts, own, strict=True)]
    longest = max(map(len, texts))
    padded = mx.array([text + [0] * (longest - len(text)) for text in texts])
    wanted, *drafted = map(backbone.embed_tokens.as_linear, states(backbone, head, padded))
    first, second = (
        agreement(logits, wanted[:, ahead:], temperature).tolist()
        for ahead, logits in enumerate(drafted, start=1)
    )
    return [
        drafts_of(*agreements, len(prompt) + 1, len(text))
        for *agreements, prompt, text in zip(first, second, prompts, texts, strict=True)
    ]


def continuations(
    model: nn.Module, tokenizer: TokenizerWrapper, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    """Up to NEW_TOKENS tokens that the model writes after each prompt, without an end mark."""
    return batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=NEW_TOKENS,
        sampler=make_sampler(temperature),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        return_token_ids=True,
    ).token_ids


def evaluate(folder: Path) -> None:
    """Print how many drafts are accepted, for every prompt and over all, and how far apart."""
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    mx.random.seed(SEED)
    head = load_head(folder, model.language_model.args)
    lines = (folder / "heldout.jsonl").read_text("utf-8").splitlines()
    prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    shares: dict[str, list[float]] = {"all texts": [], "texts that do not loop": []}
    for temperature in TEMPERATURES:
        own, found = [], []
        for start in range(0, len(prompts), BATCH):
            some = prompts[start : start + BATCH]
            texts = continuations(model, tokenizer, some, temperature)
            own += texts
            found += drafts_over(model, head, some, texts, temperature)
        loops = [repeats_itself(text) for text in own]
        for line, drafts, loop in zip(lines, found, loops, strict=True):
            print(f"{json.loads(line)['id']}: {drafts}{' (loops)' if loop else ''}")
        kinds = found, [drafts for drafts, loop in zip(found, loops, strict=True) if not loop]
        print(f"\ntemperature {temperature}; {sum(loops)} of {len(own)} texts end in a loop")
        for name, drafts in zip(shares, kinds, strict=True):
            total = sum(drafts, Drafts())
            shares[name].append(total.share)
            print(f"{name}: {total}")
        print(flush=True)
    for name, (greedy, sampling) in shares.items():
        print(f"{name}: sampling's first drafts are accepted {greedy - sampling:.4f} less")


def repeats_itself(tokens: list[int], window: int = 16) -> bool:
    """Whether a text's last `window` tokens occur earlier in it."""
    last = tokens[-window:]
    earlier = (tokens[start : start + window] for start in range(len(tokens) - window))
    return any(piece == last for piece in earlier)
