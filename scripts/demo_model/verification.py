"""Parity of the saved checkpoint in transformers, mlx-lm and the trainer's classes, float32."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import load
from safetensors.torch import load_file
from transformers.models.qwen3_5 import Qwen3_5TextModel

from scripts.demo_model import evaluation as on_mlx
from scripts.demo_model.files import TEXT_CONFIG
from scripts.demo_model.net import DemoModel

LENGTH, TOLERANCE = 256, 1e-3


def states_on_torch(folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Normed states of the backbone, transformers' and the trainer's, and of the head, [T, D]."""
    model = DemoModel.from_checkpoint(TEXT_CONFIG, folder)
    stock = Qwen3_5TextModel(model.language_model.config)
    stock.load_state_dict(model.language_model.state_dict())
    states = []
    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None]
        plain = stock(input_ids=ids[:, :-3], use_cache=False).last_hidden_state
        model(ids, lambda state, *_: states.append(state) or torch.zeros(()))
    names = ("backbone", "head, first", "head, second")
    return {"transformers": plain[0].numpy()} | {
        name: state[0].numpy() for name, state in zip(names, states, strict=True)
    }


def states_on_mlx(folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The same states from mlx-lm's backbone and the evaluation's head."""
    model, _tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    head = on_mlx.load_head(folder, model.language_model.args)
    backbone = model.language_model.model
    ids = mx.array(tokens)[None]
    hidden, first, second = on_mlx.states(backbone, head, ids)
    names = ("backbone", "head, first", "head, second")
    states = zip(names, (hidden, first, second), strict=True)
    found = {name: np.array(state[0, :LENGTH]) for name, state in states}
    return found | {"transformers": found["backbone"]}


def verify(folder: Path) -> None:
    """Print the largest differences of logits; exit with an error if one is too large."""
    tokens = np.random.default_rng(0).integers(3, TEXT_CONFIG["vocab_size"], LENGTH + 3)
    embedding = load_file(folder / "model.safetensors")["model.language_model.embed_tokens.weight"]
    expected, found = states_on_torch(folder, tokens), states_on_mlx(folder, tokens)
    for name, state in expected.items():
        logits = state @ embedding.float().numpy().T
        error = np.abs(logits - found[name] @ embedding.float().numpy().T).max()
        print(f"{name} and mlx: {error:.2e} apart, of logits up to {np.abs(logits).max():.1f}")
        if error > TOLERANCE * np.abs(logits).max():
            raise SystemExit(f"{name} differs")
