"""The demo model's folder: everything but the weights, laid out as a published Qwen3.5."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripts.demo_model.corpus import END_OF_TEXT, TURN_END, TURN_START

FULL_ATTENTION_INTERVAL = 4
LAYERS = 8

TEXT_CONFIG = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": FULL_ATTENTION_INTERVAL,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 576,
    "layer_types": [
        "linear_attention" if (i + 1) % FULL_ATTENTION_INTERVAL else "full_attention"
        for i in range(LAYERS)
    ],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 4096,
}
"""Two value heads to a key head, two query heads to a key-value head: grouped, like its elders."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '" + TURN_START + "' + message.role + '\\n' + message.content + '" + TURN_END + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '" + TURN_START + "assistant\\n' }}"
    "{%- endif %}\n"
)


def write_model_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the configuration, the tokenizer and the chat template."""
    end_of_text, turn_end = map(tokenizer.token_to_id, (END_OF_TEXT, TURN_END))
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**TEXT_CONFIG, "eos_token_id": end_of_text},
        "tie_word_embeddings": True,
        "eos_token_id": [turn_end, end_of_text],
    }
    generation_config = {
        "do_sample": False,
        "eos_token_id": [turn_end, end_of_text],
        "pad_token_id": end_of_text,
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    configs = {
        "config": config,
        "generation_config": generation_config,
        "tokenizer_config": tokenizer_config,
    }
    save_files(folder, configs, CHAT_TEMPLATE, tokenizer)


def save_files(
    folder: Path, configs: Mapping[str, Any], chat_template: str, tokenizer: Tokenizer
) -> None:
    """Save all of a model but its weights.

    Args:
        configs: what the JSON files hold, by their names without the suffix.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
