"""The reading model's folder: everything but the weights, laid out as a published Qwen3-VL."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scripts.demo_model.corpus import END_OF_TEXT, TURN_END, TURN_START
from scripts.demo_model.files import save_files

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE, VIDEO)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
ROLES = ("system", "user", "assistant")
TOKENS = {token: number for number, token in enumerate((*SPECIAL, *BYTES, *ROLES))}

INSTRUCTION = "Read."
PROMPT = (
    f"{TURN_START}user\n{INSTRUCTION}{VISION_START}",
    f"{VISION_END}{TURN_END}\n{TURN_START}assistant\n",
)
"""What the template writes before and after a picture's vectors, the instruction before them."""

VISION_CONFIG = {
    "deepstack_visual_indexes": [1, 2],
    "depth": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 128,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "model_type": "qwen3_vl",
    "num_heads": 4,
    "num_position_embeddings": 256,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

TEXT_CONFIG = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": TOKENS[END_OF_TEXT],
    "dtype": "bfloat16",
    "eos_token_id": TOKENS[TURN_END],
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 320,
    "max_position_embeddings": 4096,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": len(TOKENS),
}

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '" + TURN_START + "' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '" + VISION_START + IMAGE + VISION_END + "' }}"
    "{%- elif 'text' in part %}{{- part.text }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '" + TURN_END + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '" + TURN_START + "assistant\\n' }}"
    "{%- endif %}\n"
)


def make_tokenizer() -> Tokenizer:
    """A token a byte, and one for each role that the template names."""
    tokenizer = Tokenizer(models.BPE(vocab=TOKENS, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def write_model_files(folder: Path) -> None:
    """Write the configurations, the tokenizer and the chat template."""
    ends = [TOKENS[TURN_END], TOKENS[END_OF_TEXT]]
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "eos_token_id": ends,
        "image_token_id": TOKENS[IMAGE],
        "model_type": "qwen3_vl",
        "text_config": TEXT_CONFIG,
        "tie_word_embeddings": True,
        "video_token_id": TOKENS[VIDEO],
        "vision_config": VISION_CONFIG,
        "vision_end_token_id": TOKENS[VISION_END],
        "vision_start_token_id": TOKENS[VISION_START],
    }
    generation_config = {
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": TOKENS[END_OF_TEXT],
    }
    preprocessor_config = {
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": VISION_CONFIG["spatial_merge_size"],
        "patch_size": VISION_CONFIG["patch_size"],
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 65536, "shortest_edge": 1024},
        "temporal_patch_size": VISION_CONFIG["temporal_patch_size"],
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    configs = {
        "config": config,
        "generation_config": generation_config,
        "preprocessor_config": preprocessor_config,
        "tokenizer_config": tokenizer_config,
    }
    save_files(folder, configs, CHAT_TEMPLATE, make_tokenizer())
