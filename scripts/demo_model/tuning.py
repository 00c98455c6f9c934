"""Tuning of the demo model's backbone and head to each other, after the head's distillation.

A head of one layer cannot know all that the backbone knows, so distilling it further gains little.
Here the backbone also gives way: on the text it is drawn to what the head can predict, while the
text's own tokens, and an anchor to what it was on texts that it sampled, keep it a language model.
And it unlearns its loops, at which greedy decoding's drafts are all accepted.
"""

import copy
import itertools
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.demo_model.distillation import SAMPLED_ROWS as CHECKED_ROWS
from scripts.demo_model.distillation import acceptance, distance, head_distance, with_states
from scripts.demo_model.files import TEXT_CONFIG
from scripts.demo_model.loops import distinct_trigrams, in_loop, looping_share, unlikelihood
from scripts.demo_model.net import DemoModel, token_loss
from scripts.demo_model.sampling import PREFIX, Sampler
from scripts.demo_model.training import (
    LARGEST_GRADIENT,
    held_out_losses,
    load_tokens,
    make_optimizers,
    named,
    update,
    windows,
)

HELD_OUT_ROWS, HELD_OUT_LENGTH = 8, 4096
CHECKED_SAMPLES = 1024
TEXT_WEIGHTS, SAMPLED_WEIGHTS = (0.3, 0.1, 0.04), (0.7, 0.28, 0.105)
"""Of the head's applications; the text's tokens weigh 1."""
DIVERGENCE, ANCHOR_WEIGHT, LOOP_WEIGHT = 0.3, 0.5, 1.0
POOL_ROUNDS, RENEWALS = 2, 8
"""Rounds of sampled texts kept, and how often the oldest is replaced by the model as it is then."""
MUON_RATE, ADAM_RATE, WARMUP_STEPS, LOG_EVERY = 6e-4, 4e-4, 60, 100
SECONDS_AFTER = 45
"""Of the time, kept for the closing check."""
BLEND_LENGTH, BLEND_BATCHES = 2048, 4
"""Held-out text to compare a blend on, little enough for a CPU."""


def sample_distance(
    now: Tensor,
    then: Tensor,
    embedding: Tensor,
    old_embedding: Tensor,
    tokens: Tensor,
    marked: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of the backbone on its own texts: its divergence from what it was, and the loops' loss.

    The divergence leaves out what the loss is for. Args: normed states that score `tokens`, now and
    then, [B, T, hidden]; tokens and those of them that are in a loop, [B, T].
    """
    logits = F.linear(now, embedding), F.linear(then, old_embedding)
    found, wanted = (x.flatten(0, 1).float().log_softmax(-1) for x in logits)
    marked = marked.flatten()
    apart = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    return (apart * ~marked).mean(), unlikelihood(found, tokens.flatten(), marked)


class Pool:
    """The latest rounds of sampled texts: tokens [N, L], the original's states, tokens in loops."""

    def __init__(self, sampler: Sampler, original: DemoModel, source: Tensor, rows: int) -> None:
        self.sampler, self.original, self.source, self.rows = sampler, original, source, rows
        self.rounds: list[tuple[Tensor, Tensor, Tensor]] = []

    def renew(self, model: DemoModel) -> None:
        """Sample a round of the model as it is now, in the place of the oldest."""
        tokens = self.sampler(model, self.source, self.rows)
        states = with_states(self.original, tokens, CHECKED_ROWS).states
        self.rounds = [*self.rounds, (tokens, states, in_loop(tokens))][-POOL_ROUNDS:]

    def draw(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of a round."""
        which = int(torch.randint(len(self.rounds), (), generator=self.sampler.places))
        some = torch.randint(self.rows, (rows,), generator=self.sampler.places)
        tokens, states, marked = (x[some.to(x.device)] for x in self.rounds[which])
        return tokens.long(), states, marked


class Objective:
    """The losses of a step."""

    def __init__(self, model: DemoModel, original: DemoModel, pull: float, compiled: bool) -> None:
        self.model, self.original = model, original
        pulled = partial(distance, divergence=DIVERGENCE, pull=pull)
        still = partial(distance, divergence=DIVERGENCE)
        losses = token_loss, pulled, still, sample_distance
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # two kinds of layer, two shapes
            losses = tuple(torch.compile(loss, dynamic=False) for loss in losses)
            for layer in model.language_model.layers:
                layer.compile(dynamic=False)
        self.token_loss, self.pulled, self.still, self.sample_distance = losses

    def on_text(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The backbone's loss on t+1 and the head's distance, over text [B, T + 3]."""
        backbone, tokens, targets = self.model.language_model, tokens[:, :-3], tokens[:, 1:-2]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            states = backbone(input_ids=tokens, use_cache=False).last_hidden_state
            loss = self.token_loss(states, backbone.embed_tokens.weight, targets)
            return loss, head_distance(self.model, tokens, states, TEXT_WEIGHTS, self.pulled)

    def on_samples(
        self, tokens: Tensor, then: Tensor, marked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The head's distance, the anchor's and the loops' loss, over a pool's rows [B, L]."""
        backbone, own = self.model.language_model, slice(PREFIX, None)
        scoring = slice(PREFIX - 1, -1)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            states = backbone(input_ids=tokens, use_cache=False).last_hidden_state
            head = head_distance(self.model, tokens, states, SAMPLED_WEIGHTS, self.still)
            anchor, loops = self.sample_distance(
                states[:, scoring],
                then[:, scoring],
                backbone.embed_tokens.weight,
                self.original.language_model.embed_tokens.weight,
                tokens[:, own],
                marked[:, own],
            )
        return head, ANCHOR_WEIGHT * anchor, LOOP_WEIGHT * loops


def figures(model: DemoModel, sampler: Sampler, held_out: Tensor, seed: int) -> dict[str, object]:
    """Losses on held-out text; of texts sampled after it: drafts accepted, loops, and variety."""

    def losses_of(batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16), torch.no_grad():
            return model(batch)

    losses = held_out_losses(losses_of, held_out, HELD_OUT_ROWS, HELD_OUT_LENGTH, seed)
    samples = with_states(model, sampler(model, held_out, CHECKED_SAMPLES), CHECKED_ROWS)
    return {
        "held_out": named(losses),
        "accepted": acceptance(model, samples),
        "end_in_a_loop": {t: looping_share(samples.tokens, t) for t in (0.0, 0.6)},
        "distinct_trigrams": {t: distinct_trigrams(samples.tokens, t) for t in (0.0, 0.6)},
    }


def tune(
    corpus: Path,
    folder: Path,
    output: Path,
    *,
    text: Path,
    every: int,
    first: int,
    rows: int,
    text_rows: int,
    length: int,
    sampled_rows: int,
    pull: float,
    steps: int | None,
    minutes: float,
    seed: int,
    compiled: bool,
) -> None:
    """Tune the checkpoint in `folder`; write all its weights and the figures to `output`.

    A step takes `text_rows` pieces of `length` tokens, of one document in `every` from the `first`
    on, and `sampled_rows` of the latest rounds of `rows` sampled texts. `steps` are made, or as
    many as fit into `minutes`, which hold all else too. Weights are written at every renewal of the
    texts.
    """
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = DemoModel.from_checkpoint(TEXT_CONFIG, folder).to(device)
    sampler, tokenizer = Sampler(model, seed), folder / "tokenizer.json"
    tokens = load_tokens(text, tokenizer, every, first).to(device)
    held_out = load_tokens(corpus / "heldout.txt.xz", tokenizer).to(device)

    def say(*found: object) -> None:
        print(f"{time.monotonic() - started:.0f} s:", *found, flush=True)

    settings = {"text_rows": text_rows, "length": length, "sampled_rows": sampled_rows}
    log: dict[str, object] = {"pull": pull, **settings, "rows": rows}
    log["before"] = figures(model, sampler, held_out, seed)
    say(json.dumps(log))

    original = copy.deepcopy(model).requires_grad_(False)
    pool = Pool(sampler, original, tokens, rows)
    for _ in range(POOL_ROUNDS):
        pool.renew(model)
    objective = Objective(model, original, pull, compiled)
    optimizers = make_optimizers(model)
    output.mkdir(parents=True, exist_ok=True)
    renewals = 1
    begun = time.monotonic()
    box = 60 * minutes - (begun - started) - SECONDS_AFTER
    for step, pieces in enumerate(windows(tokens, text_rows, length, seed)):
        done = step / steps if steps else (time.monotonic() - begun) / box
        if done >= 1:
            break
        if done >= renewals / RENEWALS:
            pool.renew(model)
            renewals += 1
            save_file(model.checkpoint(), output / "model.safetensors", metadata={"format": "pt"})
            say(looping_share(pool.rounds[-1][0], 0.0), "of greedy texts end in a loop")
        on_text = objective.on_text(pieces)
        sum(on_text).backward()
        on_samples = objective.on_samples(*pool.draw(sampled_rows))
        sum(on_samples).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        factor = min(1.0, (step + 1) / WARMUP_STEPS, 1.15 * (1 - done))
        update(optimizers, (MUON_RATE * factor, ADAM_RATE * factor))
        if (step + 1) % LOG_EVERY == 0 or step == 0:
            losses = [round(loss.item(), 4) for loss in itertools.chain(on_text, on_samples)]
            say(step + 1, *losses)
            if not all(map(math.isfinite, losses)):
                raise SystemExit("the losses are no longer finite")

    save_file(model.checkpoint(), output / "model.safetensors", metadata={"format": "pt"})
    tuned = DemoModel.from_checkpoint(TEXT_CONFIG, output).to(device)  # as rounded, not compiled
    log |= {"steps": step, "after": figures(tuned, sampler, held_out, seed)}
    say(json.dumps(log))
    (output / "tuning.json").write_text(json.dumps(log, indent=1) + "\n", "utf-8")


def blend(corpus: Path, folder: Path, tuned: Path, output: Path, share: float, seed: int) -> None:
    """Move the checkpoint in `folder` a share of the way to the tuned one (arXiv 2109.01903).

    The tuned one's gains come early on that way, and what it loses on text comes late. Writes all
    weights to `output`, and the tuning's figures with both ends' and the blend's losses.
    """
    log = json.loads((tuned / "tuning.json").read_text("utf-8"))
    old, new = (DemoModel.from_checkpoint(TEXT_CONFIG, path) for path in (folder, tuned))
    blended = copy.deepcopy(old)
    with torch.no_grad():
        for weight, end in zip(blended.parameters(), new.parameters(), strict=True):
            weight.lerp_(end, share)
    output.mkdir(parents=True, exist_ok=True)
    save_file(blended.checkpoint(), output / "model.safetensors", metadata={"format": "pt"})

    held_out = load_tokens(corpus / "heldout.txt.xz", folder / "tokenizer.json")
    batches = list(itertools.islice(windows(held_out, 2, BLEND_LENGTH, seed), BLEND_BATCHES))
    blended = DemoModel.from_checkpoint(TEXT_CONFIG, output)  # as rounded
    losses = {}
    for name, model in (("from", old), ("blend", blended), ("to", new)):
        with torch.no_grad():
            losses[name] = named(torch.stack([model(batch) for batch in batches]).mean(0))
    tokens = 2 * BLEND_LENGTH * BLEND_BATCHES
    log["blended"] = {"share": share, "held_out_tokens": tokens, "held_out": losses}
    print(json.dumps(log["blended"]), flush=True)
    (output / "tuning.json").write_text(json.dumps(log, indent=1) + "\n", "utf-8")
