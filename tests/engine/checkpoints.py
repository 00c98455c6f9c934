"""Tiny checkpoints with random weights, written the way published ones are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.qwen3_5 import ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from omlx_worker.engine.models.mtp import Qwen35WithHead

EOS = "<|end|>"

QWEN_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 257,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "full_attention_interval": 4,
    "max_position_embeddings": 1024,
    "mtp_num_hidden_layers": 1,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 257,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: one token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _scaled(parameters: Any, scale: float) -> list[tuple[str, mx.array]]:
    """Spread matrices out, so that greedy choices of a random model are far from ties."""
    return [(k, v * scale if v.ndim > 1 else v) for k, v in tree_flatten(parameters)]


def write_qwen(path: Path, seed: int = 0, **text: Any) -> Path:
    """A dense Qwen3.5 with a head: raw HF names, norms stored minus one, HF's conv layout."""
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    config = {"model_type": "qwen3_5", "text_config": QWEN_TEXT | text}
    model = Qwen35WithHead(ModelArgs.from_dict(config))
    weights = {}
    for name, value in _scaled(model.parameters(), 2.0):
        if "norm" in name and value.ndim == 1 and "linear_attn.norm" not in name:
            value = 0.1 * mx.random.normal(value.shape)
        if "conv1d" in name:
            value = value.moveaxis(2, 1)
        weights[name.replace("language_model.model.", "model.language_model.")] = value
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


def write_llama(path: Path, seed: int = 0) -> Path:
    """A Llama, which has no ragged form and no head."""
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA))
    weights = dict(_scaled(model.parameters(), 3.0))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(path)
    return path
