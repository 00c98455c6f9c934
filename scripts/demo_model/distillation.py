"""Distillation of the demo model's MTP head against its own backbone, which stays as it is.

Training on the text's tokens leaves the head's distribution further from the backbone's than its
first choices are, which sampling pays for: it accepts a draft with probability sum(min(p, q)). Here
the head learns the backbone's distributions themselves, mostly on texts that the model sampled.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.demo_model.files import TEXT_CONFIG
from scripts.demo_model.net import DemoModel, MtpHead
from scripts.demo_model.sampling import PREFIX, TEMPERATURES, Sampler, row_temperatures
from scripts.demo_model.training import load_tokens, update

TEXT_LENGTH = 4096
"""Tokens of a corpus text by itself."""
SAMPLED_ROWS, TEXT_ROWS = 256, 8
"""Sequences of a step."""
APPLICATION_WEIGHTS = (1.0, 0.4, 0.15)
MARGIN = 8
"""Last positions of a sequence that start no draft: later applications need tokens and targets."""
MUON_RATE, ADAM_RATE, WARMUP_STEPS, LOG_EVERY = 2e-3, 5e-4, 50, 100
SAMPLING_SHARE = 0.4
"""Of the time: sampling stops there even if rounds are left."""


@dataclass
class Sequences:
    """Tokens [N, L] and the backbone's normed states there, [N, L, hidden]."""

    tokens: Tensor
    states: Tensor

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and states of some rows, for ever, shuffled anew on every pass."""
        while True:
            order = torch.randperm(len(self.tokens), generator=generator).to(self.tokens.device)
            for some in order[: len(order) // rows * rows].view(-1, rows):
                yield self.tokens[some].long(), self.states[some]


class Applications:
    """Keys and values of the head's applications so far, in the place of a cache.

    Application k at slot t sees the first application's slots up to t, and of each later one, its
    own among them, slot t alone: what is in the cache when slot t is where a draft starts.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.kept.append((keys, values))
        all_keys, all_values = zip(*self.kept, strict=True)
        return torch.cat(all_keys, dim=2), torch.cat(all_values, dim=2)

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """Where the next application attends, [1, 1, T, (applications so far + 1) T]."""
        if not self.kept:
            return None  # plainly causal
        square = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = torch.eye(length, dtype=torch.bool, device=device)
        return torch.cat([square, *[own] * len(self.kept)], dim=1)[None, None]


def applications(model: DemoModel, tokens: Tensor, states: Tensor) -> Iterator[Tensor]:
    """The head's normed states of each application at all slots, [B, L - MARGIN, hidden] each."""
    length, backbone, cache = tokens.shape[1] - MARGIN, model.language_model, Applications()
    embedded = backbone.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None, None].expand(3, 1, -1)
    cos, sin = backbone.rotary_emb(embedded, positions)
    state = states[:, :length]
    for depth in range(len(APPLICATION_WEIGHTS)):
        state = model.mtp(
            state,
            embedded[:, depth + 1 : depth + 1 + length],
            position_embeddings=(cos[:, depth : depth + length], sin[:, depth : depth + length]),
            past_key_values=cache,
            attention_mask=cache.mask(length, tokens.device),
        )
        yield state


def distance(
    state: Tensor, target: Tensor, embedding: Tensor, divergence: float = 0.5, pull: float = 0.0
) -> Tensor:
    """How far the head's distributions are from the backbone's, mean over all slots.

    The divergence at temperature 1, and total variation, which is the share of rejected drafts, at
    the temperatures in use; that at 0.3 stands for greedy decoding. The backbone gets `pull` times
    the gradient of the variations of sampling, and none of the rest.
    """
    found, live = (F.linear(x, embedding).flatten(0, 1).float() for x in (state, target))
    still = live.detach()
    pulled = pull * live + (1 - pull) * still if pull else still
    loss = divergence * F.kl_div(
        found.log_softmax(-1), still.log_softmax(-1), reduction="batchmean", log_target=True
    )
    for temperature, weight, wanted in ((1.0, 0.5, pulled), (0.6, 2.0, pulled), (0.3, 1.0, still)):
        gap = (found / temperature).softmax(-1) - (wanted / temperature).softmax(-1)
        loss = loss + 0.5 * weight * gap.abs().sum(-1).mean()
    return loss


def head_distance(
    model: DemoModel,
    tokens: Tensor,
    states: Tensor,
    weights: tuple[float, ...],
    distance_of: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The distances of the head's applications from the backbone's states [B, L, hidden], summed
    by their weights."""
    embedding = model.language_model.embed_tokens.weight
    total = torch.zeros((), device=tokens.device)
    for depth, state in enumerate(applications(model, tokens, states)):
        target = states[:, depth + 1 :][:, : state.shape[1]]
        total = total + weights[depth] * distance_of(state, target, embedding)
    return total


@torch.no_grad()
def with_states(model: DemoModel, tokens: Tensor, at_once: int) -> Sequences:
    """Run the backbone over sequences [N, L], L a multiple of 64."""
    pieces = []
    for some in tokens.split(at_once):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            states = model.language_model(input_ids=some.long(), use_cache=False).last_hidden_state
        pieces.append(states.bfloat16())
    return Sequences(tokens, torch.cat(pieces))


@torch.no_grad()
def acceptance(model: DemoModel, samples: Sequences) -> dict[str, list[float]]:
    """Of each application, by the rows' temperature: greedy agreement, or mean sum(min(p, q))."""
    embedding = model.language_model.embed_tokens.weight
    found: dict[str, list[float]] = {}
    for temperature in sorted(set(TEMPERATURES)):
        rows = row_temperatures(len(samples.tokens), samples.tokens.device) == temperature
        tokens, states = samples.tokens[rows].long(), samples.states[rows].float()
        for depth, state in enumerate(applications(model, tokens, states)):
            target = states[:, depth + 1 :][:, : state.shape[1]]
            logits = [F.linear(x[:, PREFIX:], embedding) for x in (state, target)]
            if temperature == 0:
                same = logits[0].argmax(-1) == logits[1].argmax(-1)
            else:
                same = torch.minimum(*((x / temperature).softmax(-1) for x in logits)).sum(-1)
            found.setdefault(str(temperature), []).append(round(same.float().mean().item(), 4))
    return found


def make_optimizers(head: MtpHead) -> list[torch.optim.Optimizer]:
    """Muon for the head's matrices, AdamW for its norms."""
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    norms = [weight for weight in head.parameters() if weight.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def distil(
    corpus: Path,
    folder: Path,
    output: Path,
    *,
    text: Path,
    every: int,
    rounds: int,
    rows: int,
    steps: int | None,
    minutes: float,
    seed: int,
    compiled: bool,
) -> None:
    """Distil the head of the checkpoint in `folder`; write weights and figures to `output`.

    `rounds` of `rows` texts are sampled; `steps` are made, or as many as fit into `minutes`, which
    hold the sampling too. Of the checkpoint's tensors only those of the head change.
    """
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    model = DemoModel.from_checkpoint(TEXT_CONFIG, folder).to(device).requires_grad_(False)
    sampler = Sampler(model, seed)
    shuffle = sampler.places
    tokenizer = folder / "tokenizer.json"
    tokens = load_tokens(text, tokenizer, every)
    held_out = sampler(model, load_tokens(corpus / "heldout.txt.xz", tokenizer), rows // 4)
    samples = []
    while len(samples) < rounds:
        samples.append(sampler(model, tokens, rows))
        seconds = time.monotonic() - started
        print(f"{len(samples)} rounds after {seconds:.0f} s", flush=True)
        if seconds > SAMPLING_SHARE * 60 * minutes:
            break
    windows = tokens[: len(tokens) // TEXT_LENGTH * TEXT_LENGTH].view(-1, TEXT_LENGTH)
    order = torch.randperm(len(windows), generator=shuffle)[: max(1, len(windows) // 4)]
    checked = with_states(model, held_out, SAMPLED_ROWS)
    on_samples = with_states(model, torch.cat(samples), SAMPLED_ROWS)
    on_text = with_states(model, windows[order].to(device), TEXT_ROWS)
    log: dict[str, object] = {"rounds": len(samples), "before": acceptance(model, checked)}
    print(json.dumps(log), f"{time.monotonic() - started:.0f} s", flush=True)

    model.mtp.requires_grad_(True)
    optimizers = make_optimizers(model.mtp)
    loss_of = torch.compile(distance, dynamic=False) if compiled else distance
    batches = zip(
        on_samples.batches(SAMPLED_ROWS, shuffle), on_text.batches(TEXT_ROWS, shuffle), strict=True
    )
    begun = time.monotonic()
    box = 60 * minutes - (begun - started)
    for step in itertools.count():
        done = step / steps if steps else (time.monotonic() - begun) / box
        if done >= 1:
            break
        losses = []
        for (some, states), share in zip(next(batches), (0.7, 0.3), strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                total = head_distance(model, some, states, APPLICATION_WEIGHTS, loss_of)
            (share * total).backward()
            losses.append(total.detach())
        nn.utils.clip_grad_norm_(model.mtp.parameters(), 1.0)
        factor = min(1.0, (step + 1) / WARMUP_STEPS, 1.2 * (1 - done))
        update(optimizers, (MUON_RATE * factor, ADAM_RATE * factor))
        if (step + 1) % LOG_EVERY == 0 or step == 0:
            shown = [round(loss.item(), 4) for loss in losses]
            print(step + 1, f"{time.monotonic() - started:.0f} s", *shown, flush=True)

    head = {name: weight for name, weight in model.checkpoint().items() if name.startswith("mtp.")}
    output.mkdir(parents=True, exist_ok=True)
    published = load_file(folder / "model.safetensors")
    save_file({**published, **head}, output / "model.safetensors", metadata={"format": "pt"})
    log |= {"steps": step, "after": acceptance(model, checked)}
    print(json.dumps(log), flush=True)
    (output / "distillation.json").write_text(json.dumps(log, indent=1) + "\n", "utf-8")
