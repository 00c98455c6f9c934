"""Training of the reading model: drawn lines in, weights out."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.reading_model.files import PROMPT, TOKENS, TURN_END, VISION_CONFIG, make_tokenizer
from scripts.reading_model.lines import WIDTH, draw
from scripts.reading_model.net import MERGE, PATCH, ReadingModel

ROWS = 128
REUSE, POOL = 3, 300
"""A drawn batch is used this many times on average, from the newest POOL."""
WARMUP_STEPS, LOG_EVERY = 20, 25
MUON_RATE, ADAM_RATE, WEIGHT_DECAY, LARGEST_GRADIENT = 4e-3, 3e-3, 0.05, 1.0
ANSWER = 34
"""Tokens of an answer, padded: one shape of batches, so that layers are compiled once."""
SLOTS, KINDS, PLACES = 8, 96, 40
"""Most characters of a vector; what a slot holds: none or a printable character; their places."""
IGNORED = -100
CROWDED = {"tower": 1.0, "text": 0.5, "all": 0.0}
"""Share of lines that fill their picture."""
SLOTS_WEIGHT = {"tower": 4.0, "text": 1.2, "all": 0.6}
"""Of the loss of vectors, beside that of the text."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines and what is to be learnt of them.

    pixels: [B, H, W] from -1 to 1
    tokens, targets: [B, N], of what comes behind the picture, and what follows each of them
    slots: [B, columns, SLOTS], characters whose centre a vector has, in their order; 0 for none
    first: [B, columns], place in the line of the first of them
    """

    pixels: Tensor
    tokens: Tensor
    targets: Tensor
    slots: Tensor
    first: Tensor


class Vectors(nn.Module):
    """Reads a vector alone, for training: without it a tower learns to see very slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Linear(VISION_CONFIG["out_hidden_size"], SLOTS * KINDS)
        self.first = nn.Linear(VISION_CONFIG["out_hidden_size"], PLACES)

    def loss(self, vectors: Tensor, batch: Batch) -> Tensor:
        """Nats a slot, and a little for the place."""
        slots = F.cross_entropy(self.slots(vectors).view(-1, KINDS), batch.slots.view(-1))
        first = self.first(vectors).view(-1, PLACES)
        return slots + 0.025 * F.cross_entropy(first, batch.first.view(-1), ignore_index=IGNORED)


def prompt() -> tuple[Tensor, Tensor]:
    """Tokens of the prompt before a picture's vectors and after them."""
    before, after = (make_tokenizer().encode(part).ids for part in PROMPT)
    return torch.tensor(before), torch.tensor(after)


def draw_batch(random: random.Random, rows: int, held: bool, crowded: float = 0.0) -> Batch:
    """Draw lines whose answer fits ANSWER tokens."""
    after, tokenizer, columns = prompt()[1], make_tokenizer(), WIDTH // (PATCH * MERGE)
    slots = np.zeros((rows, columns, SLOTS), np.int64)
    first = np.full((rows, columns), IGNORED)
    answers = torch.zeros(rows, ANSWER, dtype=torch.long)
    lengths, pixels = [], []
    while len(lengths) < rows:
        row, drawing = len(lengths), draw(random, held, crowded)
        answer = [*tokenizer.encode(drawing.text).ids, TOKENS[TURN_END]]
        if len(answer) > ANSWER:
            continue
        answers[row, : len(answer)] = torch.tensor(answer)
        lengths.append(len(answer))
        pixels.append(np.asarray(drawing.picture))
        filled = [0] * columns
        for place, character in enumerate(drawing.text):
            column = min(int(drawing.centres[place]) * columns // WIDTH, columns - 1)
            if not filled[column]:
                first[row, column] = place
            if filled[column] < SLOTS:
                slots[row, column, filled[column]] = ord(character) - ord(" ") + 1
                filled[column] += 1
    beyond = torch.arange(ANSWER) >= torch.tensor(lengths)[:, None]
    asked = torch.full((rows, len(after) - 1), IGNORED)
    return Batch(
        torch.from_numpy(np.stack(pixels)) / 127.5 - 1,
        torch.cat((after.expand(rows, -1), answers[:, :-1]), 1),
        torch.cat((asked, answers.masked_fill(beyond, IGNORED)), 1),
        torch.from_numpy(slots),
        torch.from_numpy(first),
    )


def batches(seed: int, crowded: float) -> Iterator[Batch]:
    """Batches for ever, most of them drawn earlier: drawing takes as long as half a step."""
    generator = random.Random(seed)
    pool: list[Batch] = []
    while True:
        if len(pool) < POOL // 30 or generator.randrange(REUSE) == 0:
            pool = [*pool[1 - POOL :], draw_batch(generator, ROWS, False, crowded)]
            yield pool[-1]
        else:
            yield generator.choice(pool)


def make_optimizers(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) for the layers' matrices, AdamW for all else that learns."""
    matrices, others = [], []
    for module in modules:
        for name, weight in module.named_parameters():
            inner = weight.ndim == 2 and "embed" not in name and not isinstance(module, Vectors)
            if weight.requires_grad:
                (matrices if inner else others).append(weight)
    muon = torch.optim.Muon(
        matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(stage: str, done: float) -> float:
    """Share of the full rate after the share `done` of a stage: only the last one's falls."""
    return min(1.0, 1.25 * (1 - done)) if stage == "all" else 1.0


def train(output: Path, stages: dict[str, int], threads: int, seed: int) -> None:
    """Train each stage for its number of steps; write model.safetensors.

    `tower` teaches the tower what its vectors hold. `text` keeps the tower's blocks and teaches
    the rest to write it down. `all` teaches everything, and its rate falls to nothing.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, vectors, before = ReadingModel(), Vectors(), prompt()[0]
    for embedding in (model.visual.pos_embed, model.language_model.embed_tokens):
        nn.init.normal_(embedding.weight, std=0.05)
    for layer in (*model.visual.blocks, *model.language_model.layers):
        layer.compile(dynamic=False)
    started = time.monotonic()
    for number, (stage, steps) in enumerate(stages.items()):
        source = batches(seed + number, CROWDED[stage])
        for name, weight in model.named_parameters():
            learns = {
                "tower": name.startswith("visual.") and "deepstack" not in name,
                "text": not name.startswith("visual.") or "merger" in name,
                "all": True,
            }
            weight.requires_grad_(learns[stage])
        optimizers = make_optimizers(model, vectors)
        full = [[group["lr"] for group in each.param_groups] for each in optimizers]
        for step in range(steps):
            batch = next(source)
            with torch.autocast("cpu", torch.bfloat16):
                seen = model.visual(batch.pixels)
                loss = SLOTS_WEIGHT[stage] * vectors.loss(seen[0].float(), batch)
                if stage != "tower":
                    logits = model.write(seen, before, batch.tokens).float()
                    text = F.cross_entropy(logits.mT, batch.targets, ignore_index=IGNORED)
                    loss = loss + text
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            share = min(1, (step + 1) / WARMUP_STEPS) * rate(stage, step / steps)
            for each, rates in zip(optimizers, full, strict=True):
                for group, its_rate in zip(each.param_groups, rates, strict=True):
                    group["lr"] = its_rate * share
                each.step()
                each.zero_grad()
            if (step + 1) % LOG_EVERY == 0:
                seconds = time.monotonic() - started
                print(f"{stage} {step + 1}: {seconds:.0f} s, loss {loss:.4f}", flush=True)
    save_file(model.checkpoint(), output / "model.safetensors", metadata={"format": "pt"})
