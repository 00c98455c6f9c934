"""Training of the demo model: tokens in, weights and losses out."""

import itertools
import json
import lzma
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from scripts.demo_model.corpus import END_OF_TEXT
from scripts.demo_model.files import TEXT_CONFIG
from scripts.demo_model.net import DEPTH_WEIGHTS, DemoModel, token_loss

WARMUP_STEPS, DECAY_SHARE, LOG_EVERY = 100, 0.6, 50
MUON_RATE, ADAM_RATE, WEIGHT_DECAY, LARGEST_GRADIENT = 4e-3, 3e-3, 0.1, 1.0


def load_tokens(path: Path, tokenizer_file: Path, every: int = 1, first: int = 0) -> Tensor:
    """Each document, or one in `every`, of a compressed text, ended by its mark, as one row."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with lzma.open(path, "rt", encoding="utf-8", newline="") as text:
        documents = text.read().split(END_OF_TEXT)[:-1][first::every]
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = [
        np.array([*encoding.ids, end], np.int16)
        for start in range(0, len(documents), 1000)
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 1000])
    ]
    return torch.from_numpy(np.concatenate(rows))


def windows(tokens: Tensor, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Batches [rows, length + 3] for ever: each pass cuts the text anew and shuffles the pieces."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(length + 3, device=tokens.device)
    while True:
        shift = int(torch.randint(length, (), generator=generator))
        pieces = (len(tokens) - shift - 3) // length
        order = torch.randperm(pieces, generator=generator).to(tokens.device)
        for some in order[: pieces // rows * rows].view(-1, rows):
            yield tokens[shift + some[:, None] * length + reach].long()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) for the layers' matrices, AdamW for all else.

    Only the embedding decays among AdamW's: norms, gates and convolutions do not.
    """
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "embedding": [], "other": []}
    for name, weight in model.named_parameters():
        matrix = weight.ndim == 2 and min(weight.shape) >= TEXT_CONFIG["linear_num_value_heads"] * 2
        kind = "embedding" if "embed_tokens" in name else "matrix" if matrix else "other"
        groups[kind].append(weight)
    muon = torch.optim.Muon(
        groups["matrix"],
        lr=MUON_RATE,
        weight_decay=WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [
            {"params": groups["embedding"], "weight_decay": WEIGHT_DECAY},
            {"params": groups["other"], "weight_decay": 0.0},
        ],
        lr=ADAM_RATE,
        betas=(0.9, 0.95),
    )
    return [muon, adam]


def update(optimizers: list[torch.optim.Optimizer], rates: tuple[float, ...]) -> None:
    """Make a step at each optimizer's rate, and forget the gradients."""
    for optimizer, its_rate in zip(optimizers, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = its_rate
        optimizer.step()
        optimizer.zero_grad()


def rate(step: int, steps: int | None) -> float:
    """The learning rate's factor: a warm-up, a plateau, a linear decay to nothing."""
    remaining = 1.0 if steps is None else 1 - step / steps
    return min(1.0, (step + 1) / WARMUP_STEPS, remaining / DECAY_SHARE)


def steps_that_fit(minutes: float, started: float, halfway: float) -> int:
    """The number of steps for a time box, judged by the second half of the warm-up."""
    now = time.monotonic()
    per_step = (now - halfway) / (WARMUP_STEPS // 2)
    steps = WARMUP_STEPS + max(1, int((60 * minutes - (now - started)) / per_step))
    print(f"{per_step:.4f} s a step after {now - started:.0f} s: {steps} steps", flush=True)
    return steps


def named(losses: Tensor) -> dict[str, float]:
    return {f"t+{depth}": round(loss, 4) for depth, loss in enumerate(losses.tolist(), start=1)}


def held_out_losses(
    losses_of: Callable[[Tensor], Tensor], tokens: Tensor, rows: int, length: int, seed: int
) -> Tensor:
    """The mean losses over one pass of the held-out text, [3].

    Not under no_grad, for which every layer would be compiled again.
    """
    count = max(1, len(tokens) // (rows * length) - 1)
    batches = itertools.islice(windows(tokens, rows, length, seed), count)
    return torch.stack([losses_of(batch).detach() for batch in batches]).mean(0)


def train(
    corpus: Path,
    tokenizer_file: Path,
    output: Path,
    *,
    steps: int | None,
    minutes: float | None,
    rows: int,
    length: int,
    seed: int,
    compiled: bool,
) -> None:
    """Train from scratch; write model.safetensors, and the losses as training.json.

    Either `steps` is given, or the `minutes` into which as many as fit are to go.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    tokens = load_tokens(corpus / "train.txt.xz", tokenizer_file).to(device)
    held_out = load_tokens(corpus / "heldout.txt.xz", tokenizer_file).to(device)
    print(f"{len(tokens):,} tokens to train on, {len(held_out):,} held out", flush=True)

    model = DemoModel(TEXT_CONFIG).to(device)
    optimizers = make_optimizers(model)
    weights = torch.tensor(DEPTH_WEIGHTS, device=device)
    loss = token_loss
    if compiled:
        for layer in [*model.language_model.layers, *model.mtp.layers]:
            layer.compile()
        loss = torch.compile(token_loss)

    def losses_of(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(batch, loss)

    log: list[dict[str, object]] = []
    started = halfway = time.monotonic()
    for step, batch in enumerate(windows(tokens, rows, length, seed)):
        if step == WARMUP_STEPS and steps is None:
            steps = steps_that_fit(minutes, started, halfway)
        if step == steps:
            break
        losses = losses_of(batch)
        (losses * weights).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        factor = rate(step, steps)
        update(optimizers, (MUON_RATE * factor, ADAM_RATE * factor))
        if (step + 1) % LOG_EVERY == 0:
            seconds = round(time.monotonic() - started, 1)
            log.append({"step": step + 1, "seconds": seconds, **named(losses)})
            print(json.dumps(log[-1]), flush=True)
            if not losses.isfinite().all():
                raise SystemExit("the losses are no longer finite")
        if step + 1 == WARMUP_STEPS // 2:
            halfway = time.monotonic()

    output.mkdir(parents=True, exist_ok=True)
    save_file(model.checkpoint(), output / "model.safetensors", metadata={"format": "pt"})
    final = named(held_out_losses(losses_of, held_out, rows, length, seed))
    log.append({"step": steps, "tokens": steps * rows * length, "held_out": final})
    print(json.dumps(log[-1]), flush=True)
    (output / "training.json").write_text(json.dumps(log, indent=1) + "\n", "utf-8")
