"""Tiny models of mlx-lm's families, with random weights in float32."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

SLIDING = 24
"""Positions of the sliding windows: shorter than a tail, so that rings turn within one."""

_PLAIN_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_YARN = _PLAIN_ROPE | {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_ROPES = {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING,
    "sliding_window_pattern": 2,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    # Norms, by the names that families give them.
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "use_qk_norm": True,
    # Scales and limits.
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    # Mixtures of experts.
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "rotary_dim": 8,
    "rope_parameters": _PLAIN_ROPE,
}

LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
}

SPARSE = LATENT | {
    "first_k_dense_replace": 1,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 16,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Attention to the latents that an indexer chooses."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": None},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {},
    "glm4_moe": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3": {"text_config": COMMON | {"model_type": "gemma3_text"}},
    "gemma3n": {
        "text_config": COMMON
        | {
            "model_type": "gemma3n_text",
            "intermediate_size": [96] * 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 257,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "laurel_rank": 8,
            "rope_local_base_freq": 10_000.0,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        }
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 257,
        "global_head_dim": 32,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "rope_parameters": _ROPES,
    },
    "gpt_oss": {},
    "starcoder2": {},
    "cohere2": {},
    "exaone4": {"sliding_window_pattern": "LG"},
    "granite": {},
    "granitemoe": {},
    "mixtral": {},
    "ministral3": {"rope_parameters": _YARN},
    "mistral3": {"text_config": COMMON | {"model_type": "llama", "layer_types": None}},
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "dots1": {},
    "helium": {},
    "mimo": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2},
    "minimax": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    "stablelm": {"use_qkv_bias": False},
    "phi": {},
    "afmoe": {},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "mistral4": LATENT | {"rope_parameters": _YARN | {"original_max_position_embeddings": 16}},
    "longcat_flash": LATENT
    | {
        "attention_method": "MLA",
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "gear": {},
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.25},
    "gpt2": {
        "n_ctx": 4096,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 4096,
        "layer_norm_epsilon": 1e-5,
    },
    "deepseek_v2": LATENT
    | {"topk_method": "greedy", "rope_scaling": _YARN | {"original_max_position_embeddings": 1024}},
    "plamo3": {"window_size": SLIDING},
}
"""Families that keep keys and values alone, and what their configuration adds to the common one."""

MAMBA: dict[str, Any] = {
    "state_size": 16,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "layer_norm_epsilon": 1e-5,
}

MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_rms_norm": True,
}

CONVOLUTION: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_bias": False,
    "conv_L_cache": 3,
    "rope_parameters": None,
}

BAILING: dict[str, Any] = {
    "layer_group_size": 2,
    "group_norm_size": 1,
    "use_qkv_bias": False,
    "score_function": "sigmoid",
    "use_rmsnorm": True,
    "num_nextn_predict_layers": 0,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
    "norm_head": False,
    "norm_softmax": False,
    "rope_interleave": True,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": CONVOLUTION
    | {
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": CONVOLUTION | {"num_dense_layers": 1, "use_expert_bias": True},
    "mamba": MAMBA,
    "mamba2": MAMBA | {"num_heads": 4, "n_groups": 1, "time_step_limit": (0.0, 100.0)},
    "nemotron_h": MAMBA
    | {
        "hybrid_override_pattern": list("M*-ME"),
        "layer_types": None,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": MAMBA2
    | {
        "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "nope",
        "time_step_limit": (0.001, 100.0),
    },
    "falcon_h1": MAMBA2,
    "jamba": MAMBA2
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    "kimi_linear": LATENT
    | {
        "q_lora_rank": None,
        "model_max_length": 4096,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
    },
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "attention_window_size": 4096,
    },
    "bailing_moe_linear": BAILING,
    "bailing_hybrid": LATENT | BAILING,
    "bailing_moe_v3": LATENT | BAILING,
}
"""Families with recurrent or convolution layers."""


REFUSED: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "minimax_m3_vl": {
        "text_config": COMMON
        | {
            "model_type": "minimax_m3",
            "dense_intermediate_size": 96,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        }
    },
    "baichuan_m1": {
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": SLIDING,
        "layer_types": None,
        "block_types": ["recurrent", "recurrent", "attention", "recurrent"],
    },
    "internlm2": {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internlm3": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 4096,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "longcat_flash_ngram": LATENT
    | {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE | {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
    "deepseek_v41": {
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 32,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 8,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": COMMON
        | {
            "model_type": "llama4_text",
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
        }
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
    },
    "phixtral": {"num_vocab": 257, "model_dim": 64, "num_heads": 4, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
}
"""Families without a ragged form, which docs/operations.md lists."""


def config_of(family: str) -> dict[str, Any]:
    return COMMON | {"model_type": family} | (FAMILIES | RECURRENT | REFUSED)[family]


def tiny(family: str, seed: int = 0, **config: Any) -> nn.Module:
    """A model of a family of mlx-lm, named by its module."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config_of(family) | config))
    # Some parts start at zero, and would do nothing.
    model.update(
        tree_map(lambda part: part + 0.1 * mx.random.normal(part.shape), model.parameters())
    )
    mx.eval(model.parameters())
    return model
