"""Train, check and measure the demo model (worker/omlx_worker/demo_model).

A Qwen3.5 of 7.55M parameters, its MTP head included, trained from scratch on permissively licensed
Python. Everything is seeded: two runs differ by the rounding of a GPU's reductions alone.

    python -m scripts.demo_model.train corpus       # download, filter, split; tokenizer, prompts
    python -m scripts.demo_model.train train        # on a GPU; writes model.safetensors
    python -m scripts.demo_model.train distil       # on a GPU; refits the head to the backbone
    python -m scripts.demo_model.train tune         # on a GPU; fits backbone and head to each other
    python -m scripts.demo_model.train blend TUNED  # moves the checkpoint part of that way
    python -m scripts.demo_model.train verify       # against transformers and mlx-lm, float32
    python -m scripts.demo_model.train --evaluate   # acceptance of drafts; needs mlx-lm only

The shipped weights were made with Python 3.11.7's library in the corpus, torch 2.11.0 and
transformers 5.17.0, on one NVIDIA H200, by

    python -m scripts.demo_model.train train --minutes 8.4

which came to --steps 2941 (0.156 s each; 385 million tokens, 4.4 times the corpus). The losses on
the held-out files, in nats a token: 1.4051 on t+1, 1.5435 on the head's t+2, 1.6321 on the t+3 of
its second application. Then the head alone, the backbone's tensors staying bit for bit the same, by

    python -m scripts.demo_model.train distil --minutes 4.8

on the same hardware, which came to --steps 2350 after 12 rounds of 4,096 sampled texts. Run it on
what `train` wrote: it starts from the checkpoint that it finds. On texts that the model sampled
after held-out prefixes, before and after: greedy 94.8% to 95.6% of first drafts accepted, 87.6% to
88.7% at temperature 0.6, 73.6% to 74.8% at 1.
Over the 64 held-out prompts and 128 tokens each, greedy: the first draft accepted 93.6% of the
time, the second, after an accepted first, 93.3%; over the texts that do not end in a loop 91.4%
and 90.8%.
"""

import json
import lzma
import random
from pathlib import Path
from typing import Any

import click

from scripts.demo_model import corpus as corpus_of
from scripts.demo_model.files import TEXT_CONFIG, write_model_files

MODEL_FOLDER = Path(__file__).parents[2] / "worker" / "omlx_worker" / "demo_model"
CORPUS_FOLDER = Path(__file__).parents[2] / ".corpus"
SEED = 20


@click.group(invoke_without_command=True)
@click.option("--evaluate", is_flag=True, help="Measure a checkpoint's drafts.")
@click.option("--model", type=Path, default=MODEL_FOLDER, help="Its folder; else the shipped one.")
@click.pass_context
def main(context: click.Context, evaluate: bool, model: Path) -> None:
    """Train, check and measure the demo model."""
    if evaluate:
        from scripts.demo_model.evaluation import evaluate as measure

        measure(model)
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@click.option("--prompts", default=64, show_default=True, help="Held-out prompts to keep.")
@click.option("--chat-share", default=0.05, show_default=True, help="Of the training text.")
def corpus(prompts: int, chat_share: float) -> None:
    """Collect the text; write the tokenizer, the configuration and the held-out prompts."""
    wheels = CORPUS_FOLDER / "wheels"
    corpus_of.download_packages(wheels)
    training, held_out = corpus_of.collect(wheels)
    documents = [source.text for source in training]
    documents += corpus_of.chat_samples(training, chat_share, SEED)
    random.Random(SEED).shuffle(documents)
    write_documents(CORPUS_FOLDER / "train.txt.xz", documents)
    write_documents(CORPUS_FOLDER / "heldout.txt.xz", [source.text for source in held_out])

    tokenizer = corpus_of.train_tokenizer(documents[::4], TEXT_CONFIG["vocab_size"])
    write_model_files(MODEL_FOLDER, tokenizer)
    with (MODEL_FOLDER / "heldout.jsonl").open("w", encoding="utf-8") as lines:
        for prompt in corpus_of.heldout_prompts(held_out, prompts, SEED):
            lines.write(json.dumps(prompt) + "\n")
    for name, files in (("training", training), ("held out", held_out)):
        characters = sum(len(source.text) for source in files)
        print(f"{name}: {len(files):,} files, {characters:,} characters")


def write_documents(path: Path, documents: list[str]) -> None:
    """Write documents as one compressed text, each ended by the end-of-text mark."""
    with lzma.open(path, "wt", encoding="utf-8", newline="") as text:
        text.writelines(document + corpus_of.END_OF_TEXT for document in documents)


@main.command()
@click.option("--steps", type=int, help="Steps to train for.")
@click.option("--minutes", type=float, help="Instead of --steps: as many as fit.")
@click.option("--rows", default=32, show_default=True, help="Sequences of a step.")
@click.option("--length", default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--compile/--eager", "compiled", default=True, help="torch.compile the layers.")
@click.option("--output", type=Path, default=MODEL_FOLDER, show_default=True)
def train(
    steps: int | None, minutes: float | None, rows: int, length: int, compiled: bool, output: Path
) -> None:
    """Train from scratch; write model.safetensors and the losses."""
    from scripts.demo_model import training

    if (steps is None) == (minutes is None):
        raise click.UsageError("give one of --steps and --minutes")
    training.train(
        CORPUS_FOLDER,
        MODEL_FOLDER / "tokenizer.json",
        output,
        steps=steps,
        minutes=minutes,
        rows=rows,
        length=length,
        seed=SEED,
        compiled=compiled,
    )


@main.command()
@click.option("--text", type=Path, default=CORPUS_FOLDER / "train.txt.xz", show_default=True)
@click.option("--every", default=5, show_default=True, help="One document in this many is used.")
@click.option("--rounds", default=12, show_default=True, help="Rounds of sampling, at most.")
@click.option("--rows", default=4096, show_default=True, help="Texts of a round.")
@click.option("--steps", type=int, help="Steps to train for; else as many as fit.")
@click.option("--minutes", default=6.0, show_default=True, help="For everything.")
@click.option("--compile/--eager", "compiled", default=True, help="torch.compile the loss.")
@click.option("--output", type=Path, default=MODEL_FOLDER, show_default=True)
def distil(**options: Any) -> None:
    """Fit the head's distributions to the backbone's; write model.safetensors and the figures."""
    from scripts.demo_model import distillation

    distillation.distil(CORPUS_FOLDER, MODEL_FOLDER, seed=SEED, **options)


@main.command()
@click.option("--text", type=Path, default=CORPUS_FOLDER / "train.txt.xz", show_default=True)
@click.option("--every", default=2, show_default=True, help="One document in this many is used.")
@click.option("--first", default=1, show_default=True, help="The first of these, from 0.")
@click.option("--rows", default=2048, show_default=True, help="Texts of a round of sampling.")
@click.option("--text-rows", default=16, show_default=True, help="Pieces of text of a step.")
@click.option("--length", default=2048, show_default=True, help="Tokens of a piece.")
@click.option("--sampled-rows", default=64, show_default=True, help="Sampled texts of a step.")
@click.option("--pull", default=3.0, show_default=True, help="Of the head on the backbone.")
@click.option("--steps", type=int, help="Steps to train for; else as many as fit.")
@click.option("--minutes", default=8.6, show_default=True, help="For everything.")
@click.option("--compile/--eager", "compiled", default=True, help="torch.compile it.")
@click.option("--output", type=Path, default=MODEL_FOLDER, show_default=True)
def tune(**options: Any) -> None:
    """Fit backbone and head to each other; write model.safetensors and the figures."""
    from scripts.demo_model import tuning

    tuning.tune(CORPUS_FOLDER, MODEL_FOLDER, seed=SEED, **options)


@main.command()
@click.argument("tuned", type=Path)
@click.option("--share", default=0.75, show_default=True, help="Of the way to the tuned weights.")
@click.option("--output", type=Path, default=MODEL_FOLDER, show_default=True)
def blend(tuned: Path, share: float, output: Path) -> None:
    """Move the checkpoint some of the way to what `tune` wrote to the folder TUNED."""
    from scripts.demo_model import tuning

    tuning.blend(CORPUS_FOLDER, MODEL_FOLDER, tuned, output, share, SEED)


@main.command()
def verify() -> None:
    """Compare the checkpoint's logits in transformers, mlx-lm and the trainer's own classes."""
    from scripts.demo_model.verification import verify as compare

    compare(MODEL_FOLDER)


if __name__ == "__main__":
    main()
