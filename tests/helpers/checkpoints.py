"""Tiny checkpoints with random weights, written the way published ones are laid out."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.models import llama, qwen3_vl
from mlx_lm.utils import _get_classes, load_model, load_tokenizer, quantize_model, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from omlx_worker.engine.loading.loader import classes_with_head
from omlx_worker.engine.models.assistant import Assistant, AssistantArgs
from omlx_worker.engine.models.mtp import with_head
from tests.helpers.families import config_of, tiny

EOS = "<|eos|>"

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

MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
"""What makes a mixture of experts of a Qwen's text configuration."""

QWEN_NEXT: dict[str, Any] = {
    **{k: v for k, v in QWEN_TEXT.items() if k != "mtp_num_hidden_layers"},
    **MIXTURE,
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
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


QWEN_VL_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 257,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}


def write_tokenizer(path: Path, *, ends_texts: bool = False) -> None:
    """A byte-level tokenizer: one token a byte, and an end token.

    Args:
        ends_texts: whether the end token follows each text, and there are no chats.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    if ends_texts:
        end = (EOS, tokenizer.token_to_id(EOS))
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {EOS}", None, [end])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    }
    if ends_texts:
        del config["chat_template"]
        config["pad_token"] = EOS
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _scaled(parameters: Any, scale: float) -> list[tuple[str, mx.array]]:
    """Spread matrices out, so that greedy choices of a random model are far from ties."""
    return [(k, v * scale if v.ndim > 1 else v) for k, v in tree_flatten(parameters)]


def write_qwen(path: Path, seed: int = 0, **text: Any) -> Path:
    """A dense Qwen3.5 with a head: raw HF names, norms stored minus one, HF's conv layout."""
    return _write_raw(path, seed, {"model_type": "qwen3_5", "text_config": QWEN_TEXT | text})


def write_qwen_moe(path: Path, seed: int = 0, **text: Any) -> Path:
    """A mixture-of-experts Qwen3.5 with a head, likewise, its experts fused as HF has them."""
    text = QWEN_TEXT | MIXTURE | text
    return _write_raw(path, seed, {"model_type": "qwen3_5_moe", "text_config": text})


def write_qwen_next(path: Path, seed: int = 0, **config: Any) -> Path:
    """A Qwen3-Next with a head that its configuration does not mention, experts apart."""
    return _write_raw(path, seed, QWEN_NEXT | config)


def _write_raw(path: Path, seed: int, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    family, args = _get_classes(config)
    model = with_head(family)(args.from_dict(config))
    weights: dict[str, mx.array] = {}
    for name, value in _scaled(model.parameters(), 2.0):
        if "norm" in name and value.ndim == 1 and "linear_attn.norm" not in name:
            value = 0.1 * mx.random.normal(value.shape)
        if "conv1d" in name:
            value = value.moveaxis(2, 1)
        name = name.replace("language_model.model.", "model.language_model.")
        weights[name.replace("language_model.lm_head", "lm_head")] = value
    if not config.get("text_config", {"mtp_num_hidden_layers": 1})["mtp_num_hidden_layers"]:
        weights = {name: value for name, value in weights.items() if "mtp." not in name}
    experts = split_experts if config["model_type"] == "qwen3_next" else fuse_experts
    mx.save_safetensors(str(path / "model.safetensors"), experts(weights), {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


def write_glm(path: Path, seed: int = 0) -> Path:
    """A GLM-4.7-Flash with Hugging Face's names: its head is one layer more than it has."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_of("glm4_moe_lite") | {"num_nextn_predict_layers": 1}
    mx.random.seed(seed)
    family, args = _get_classes(config)
    model = with_head(family)(args.from_dict(config))
    appended = f"model.layers.{config['num_hidden_layers']}."
    names = {
        "mtp.pre_fc_norm_embedding.": f"{appended}enorm.",
        "mtp.pre_fc_norm_hidden.": f"{appended}hnorm.",
        "mtp.fc.": f"{appended}eh_proj.",
        "mtp.norm.": f"{appended}shared_head.norm.",
        "mtp.layers.0.": appended,
    }
    weights = dict[str, mx.array]()
    for name, value in _scaled(model.parameters(), 2.0):
        start = next((start for start in names if name.startswith(start)), "")
        weights[names.get(start, "") + name.removeprefix(start)] = value
    for name in [name for name in weights if name.endswith("embed_q.weight")]:
        parts = weights.pop(name), weights.pop(name.replace("embed_q", "unembed_out"))
        joined = mx.concatenate([parts[0].swapaxes(-1, -2), parts[1]], axis=1)
        weights[name.replace("embed_q", "kv_b_proj")] = joined.flatten(0, 1)
    weights[f"{appended}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{appended}shared_head.head.weight"] = weights["lm_head.weight"]
    mx.save_safetensors(str(path / "model.safetensors"), split_experts(weights), {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


def shard(path: Path, shards: int = 3) -> Path:
    """Split the weights of a checkpoint into files with an index, its head in the last one."""
    file = path / "model.safetensors"
    weights = mx.load(str(file))
    mx.eval(weights)
    file.unlink()
    backbone = sorted(name for name in weights if "mtp." not in name)
    parts = [backbone[i :: shards - 1] for i in range(shards - 1)]
    parts.append([name for name in weights if "mtp." in name])
    index: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(path / name), {n: weights[n] for n in names}, {"format": "pt"})
        index |= dict.fromkeys(names, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def convert_without_head(path: Path, to: Path, bits: int | None = None) -> Path:
    """What mlx-lm makes of a raw checkpoint: a copy whose head is lost."""
    with redirect_stdout(io.StringIO()):
        convert(str(path), str(to), quantize=bits is not None, q_bits=bits, q_group_size=32)
    return to


def convert_with_head(path: Path, to: Path, bits: int | None = None) -> Path:
    """What others make of a raw checkpoint: a copy that has its head, in mlx-lm's form."""
    network, config = load_model(path, get_model_classes=classes_with_head)
    if bits:
        network, config = quantize_model(network, config, 32, bits)
    with redirect_stdout(io.StringIO()):
        save(to, path, network, load_tokenizer(path), config)
    return to


def fuse_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """From mlx-lm's stacked experts to HF's ``experts.gate_up_proj`` and ``down_proj``."""
    fused = {}
    for name, value in weights.items():
        if name.endswith("switch_mlp.gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            name = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            fused[name] = mx.concatenate([value, up], axis=-2)
        elif name.endswith("switch_mlp.down_proj.weight"):
            fused[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = value
        elif "switch_mlp" not in name:
            fused[name] = value
    return fused


def split_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """From mlx-lm's stacked experts to one matrix per expert and projection."""
    split = {}
    for name, value in weights.items():
        if "switch_mlp" in name:
            for expert, matrix in enumerate(value):
                split[name.replace("switch_mlp", f"experts.{expert}")] = matrix
        else:
            split[name] = value
    return split


def write_llama(path: Path, seed: int = 0, **config: Any) -> Path:
    """A Llama, which has no head."""
    mx.random.seed(seed)
    config = LLAMA | config
    return _write(path, llama.Model(llama.ModelArgs.from_dict(config)), config)


def write_qwen_vl(path: Path, seed: int = 0, **text: Any) -> Path:
    """The text model of a Qwen3-VL, with Hugging Face's names."""
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    config = {"model_type": "qwen3_vl", "text_config": QWEN_VL_TEXT | text}
    model = qwen3_vl.Model(qwen3_vl.ModelArgs.from_dict(config))
    weights = {
        name.replace("language_model.model.", "model.language_model."): value
        for name, value in _scaled(model.parameters(), 3.0)
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


EMBEDDING: dict[str, dict[str, Any]] = {
    "qwen3": LLAMA
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    | {"rope_theta": 1_000_000.0},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "hidden_size": 60,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 257,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "_sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 512,
        "use_bidirectional_attention": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
"""Configurations of models of embeddings. The square root of 60 is no number of bfloat16."""

VECTOR = {"qwen3": 64, "gemma3_text": 60}
"""Numbers of their vectors."""


def write_embedding(path: Path, family: str = "qwen3", *, nested: bool = False) -> Path:
    """A model of embeddings with random weights, as sentence-transformers saves it.

    Args:
        nested: whether its tensors have the names that mlx-lm gives them.
    """
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(0)
    config = EMBEDDING[family]
    model_class, args = _get_classes(config)
    weights = {
        name if nested else name.removeprefix("model."): weight
        for name, weight in _scaled(model_class(args.from_dict(config)).parameters(), 2.0)
        if not name.startswith("lm_head.")
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    size, mean = config["hidden_size"], family == "gemma3_text"
    pooling = {
        "word_embedding_dimension": size,
        "pooling_mode_mean_tokens": mean,
        "pooling_mode_lasttoken": not mean,
        "include_prompt": True,
    }
    modules = [("Transformer", "", {}), ("Pooling", "1_Pooling", pooling)]
    if mean:
        for name, sizes in (("2_Dense", (size, 96)), ("3_Dense", (96, size))):
            dense = {"in_features": sizes[0], "out_features": sizes[1], "bias": False}
            dense["activation_function"] = "torch.nn.modules.linear.Identity"
            modules.append(("Dense", name, dense))
    modules.append(("Normalize", f"{len(modules)}_Normalize", {}))
    for kind, folder, settings in modules[1:]:
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(settings))
        if kind == "Dense":
            weight = mx.random.normal((settings["out_features"], settings["in_features"])) * 0.1
            mx.save_safetensors(str(path / folder / "model.safetensors"), {"linear.weight": weight})
    write_modules(path, [(kind, folder) for kind, folder, _ in modules])
    write_tokenizer(path, ends_texts=True)
    return path


def write_modules(path: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Name the modules of a model of embeddings, each with its folder."""
    listed = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))


def write_family(path: Path, family: str, **config: Any) -> Path:
    """A tiny model of any of `FAMILIES`, as mlx-lm saves it."""
    whole = config_of(family) | config
    given = {name: value for name, value in whole.items() if value is not None}
    return _write(path, tiny(family, **config), given)


def write_assistant(
    path: Path, bits: int | None = None, vocabulary: int = 257, **config: Any
) -> Path:
    """An assistant of the tiny ``gemma4_text``, without a tokenizer.

    Args:
        bits: of quantised weights.
    """
    path.mkdir(parents=True, exist_ok=True)
    mx.random.seed(7)
    text = config_of("gemma4_text") | {"num_hidden_layers": 3, "hidden_size": 32}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text |= {"layer_types": kinds, "vocab_size": vocabulary}
    config = {"backbone_hidden_size": 64, "text_config": text, **config}
    config = {"model_type": "gemma4_assistant", **config}
    assistant = Assistant(AssistantArgs.from_dict(config))
    assistant.load_weights(_scaled(assistant.parameters(), 3.0))
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(assistant, **config["quantization"])
    weights = dict(tree_flatten(assistant.parameters()))
    order = weights.get("masked_embedding.token_ordering")
    if order is not None:
        order = mx.random.permutation(order.size).astype(mx.int64)
        weights["masked_embedding.token_ordering"] = order
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def _write(path: Path, model: nn.Module, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(_scaled(model.parameters(), 3.0))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path
