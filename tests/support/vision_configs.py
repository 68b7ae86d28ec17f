"""A tiny ``config.json`` for each model folder of mlx-vlm that has a language model."""

from __future__ import annotations

import copy
from typing import Any

from outcore_vision.names import FOLDERS
from zoo_configs import BASE, CONFIGS, DELTA, INDEXER, MLA, MOE

Config = dict[str, Any]

TOWER: Config = {
    "model_type": "tower",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "width": 64,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "heads": 2,
    "spatial_merge_size": 2,
}

TEXT: Config = {
    **MLA,
    **INDEXER,
    **DELTA,
    **BASE,
    **MOE,
    "sliding_window": 4,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}

SLIDING: Config = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}

QWEN: Config = {
    "rope_parameters": {"type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}

MAMBA: Config = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "mlp_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": "M*E-",
    "time_step_limit": [0.001, 1.0],
    "residual_in_fp32": False,
    "layer_norm_epsilon": 1e-5,
    "moe_shared_expert_intermediate_size": 64,
}

LFM: Config = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
    "layer_types": ["conv", "full_attention"] * 2,
    "theta": 1e4,
    "rope_theta": 1e4,
}

PROJECTOR: Config = {
    "projector_config": {"projector_type": "linear", "input_dim": 64, "n_embed": 64, "depth": 1, "mlp_ratio": 1}
}

M3: Config = {
    "moe_layer_freq": [0, 1, 1, 1],
    "dense_intermediate_size": 128,
    "rotary_dim": 16,
    "num_local_experts": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk_blocks": 2,
    "index_block_size": 4,
}

GLM_OCR: Config = {
    "model_type": "glm_ocr_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [8, 4, 4],
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e4,
    },
}

OMNI: Config = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "shared_expert_intermediate_size": 64,
    "rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]},
}

OMNI_EYES: Config = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}

OMNI_EARS: Config = {
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_hidden_layers": 1,
    "output_dim": 64,
    "downsample_hidden_size": 16,
}

PHI4: Config = {
    "model_type": "phi4-siglip",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# What differs by folder: keys of the top, and of its parts. ``tower``: the tower's ``model_type``; ``text``: the
# language model's; ``without``: keys that its classes do not take, or that must have their own defaults.
OWN: dict[str, Config] = {
    "aya_vision": {"tower": "siglip_vision_model", "head_dim": 16, "text_config": {**SLIDING, "head_dim": 16}},
    "cohere2_moe": SLIDING,
    "cohere_compass": {"tower": "cohere_compass_vision", "text_config": {**SLIDING, "without": ["rope_parameters"]}},
    "clef": {
        "tower": "qwen3_5",
        "text_config": QWEN,
        "head_config": dict.fromkeys(("hidden_size", "width", "feedforward"), 64)
        | dict.fromkeys(("routing_layers", "layers", "heads"), 1),
    },
    "colidefics3": {"tower": "idefics3"},
    "colqwen2_5": {"tower": "qwen2_5_vl"},
    "d1": {"tower": "lfm2_vl", "text_config": LFM, **LFM},
    "decider2": QWEN,
    "deepseek_v4": {
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "index_block": 4,
        "index_keep": 2,
        "without": ["rope_parameters", "layer_types"],
    },
    "deepseek_vl_v2": {"tower": "vision", **PROJECTOR},
    "deepseekocr": {"tower": "vision", **PROJECTOR},
    "deepseekocr_2": {"vision_config": {"only": {"model_type": "vision", "width": {}}}, **PROJECTOR},
    "diffusion_gemma": SLIDING,
    "embedding_gemma2": SLIDING,
    "flint": SLIDING,
    "glm_ocr": {
        "without": ["rope_theta", "partial_rotary_factor"],
        "text_config": {"only": GLM_OCR},
        "vision_config": {"only": {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64}},
    },
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "index_kpool": 2,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "without": ["rope_parameters"],
        }
    },
    "hunyuan_vl": {
        "rope_scaling": {
            "type": "xdrope",
            "xdrope_section": [4, 4, 4, 4],
            "alpha": 1000.0,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    "idefics2": {
        "tower": "idefics2",
        "perceiver_config": {
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 32,
            "num_key_value_heads": 2,
            "model_type": "idefics2",
        },
    },
    "indic_ocr": {"tower": "qwen3_5", "text_config": QWEN},
    "internvl_chat": {"tower": "intern_vit_6b"},
    "kolibri1": SLIDING,
    "lfm2_colbert": LFM,
    "lfm2_embedding": LFM,
    "lfm2_encoder": LFM,
    "lfm2_vl": {"text_config": LFM},
    "lille_130m": {"n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "limite": {
        "softcap_logits": {"kind": "sigmoid", "a": 30.0, "b": 0.0, "c": 2.0},
        "ve_gate_channels": 12,
        "attn_gate_channels": 16,
        "ve_dim": 16,
        "head_dim": 16,
        "rope_n_pairs": 8,
        "mudd_inter": 16,
        "global_layers": [1, 3],
        "ve_layers": [0],
        "xsa_layers": [1],
        "ve_stored_heads": 2,
    },
    "llava_bunny": {"tower": "siglip_vision_model", "auto_map": {}, "mm_hidden_size": 64, "text": "qwen2"},
    "llava_next": {"tower": "clip_vision_model", "text": "llama"},
    "llmjpvl": {"tower": "siglip_vision_model", "text": "llama"},
    "longcat_flash_sparse": {
        "num_layers": 2,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "rope_scaling": None,
        "without": ["rope_parameters"],
    },
    "mimo_v2": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "v_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": 4,
        }
    },
    "minicpmv4_6": {"tower": "siglip", "text_config": QWEN, **QWEN},
    "minimax_m3": {**M3, "text_config": M3},
    "mistral_large3": {"tower": "pixtral"},
    "molmo": {
        "text_config": {
            "d_model": 64,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 4,
            "mlp_hidden_size": 128,
            "embedding_size": 128,
            "additional_vocab_size": 8,
        },
        "vision_config": {
            "image_emb_dim": 64,
            "image_num_layers": 2,
            "image_num_heads": 2,
            "image_num_key_value_heads": 2,
            "image_head_dim": 32,
            "image_mlp_dim": 64,
            "d_model": 64,
            "image_num_pos": 5,
            "vit_layers": [-1, -2],
        },
    },
    "molmo_point": {
        "vit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        },
        "adapter_config": {"vit_layers": [-1, -2], "hidden_size": 64},
    },
    "multi_modality": {
        "tower": "vision",
        "vision_config": {"params": {}, "cls": "tower"},
        "text": "llama",
        "projector_config": {
            "cls": "MlpProjector",
            "model_type": "mlp_gelu",
            "params": {"depth": 2, "input_dim": 64, "n_embed": 64, "projector_type": "mlp_gelu"},
        },
    },
    "nemotron_h_nano_omni": {"text_config": MAMBA, "llm_config": {}, **MAMBA},
    "nemotron_nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_parse": {
        "text_config": {"d_model": 64, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "decoder_layers": 3}
    },
    "paligemma": {
        "tower": "siglip_vision_model",
        "text": "gemma2",
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi4_siglip": {
        "text_config": {"only": PHI4},
        "vision_config": {
            "only": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_patches": 4,
            }
        },
    },
    "phi3_v": {"vision_config": {"model_type": "phi3_v", "image_dim_out": 64}, "img_processor": {"image_dim_out": 64}},
    "plamo2vl": {"tower": "siglip_vision_model", "text": "plamo2"},
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": OMNI, "vision_config": OMNI_EYES, "audio_config": OMNI_EARS},
        "talker_config": {
            "text_config": OMNI,
            "code_predictor_config": {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "vocab_size": 64,
            },
        },
        "code2wav_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "decoder_dim": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "codebook_size": 64,
            "codebook_dim": 32,
        },
        "text_config": {"only": {}},
        "vision_config": {"only": {}},
    },
    "qwen3_vl_embedding": {"tower": "qwen3_vl"},
    "qwen4_exp": {
        "text_config": {
            **QWEN,
            "ple_layer_ids": [1],
            "ple_embed_dim": 64,
            "ngram_vocab_size_base": 64,
            "heads_per_ngram": 2,
            "split_ngram_parts": 2,
            "make_ngram_vocab_size_divisible_by": 8,
            "hc_lowrank": 16,
            "indexer_head_dim": 32,
            "indexer_n_heads": 2,
            "indexer_budget": 8,
        }
    },
    "smolvlm": {"tower": "idefics3"},
    "unlimited_ocr": {"tower": "vision", **PROJECTOR},
    "zaya1_vl": {"tower": "qwen2_5_vl"},
    "gemma4_unified": {"text_config": SLIDING, **SLIDING},
    "glm4v_moe": {
        "rope_parameters": {
            "type": "default",
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "paddleocr_vl": {
        "rope_parameters": {"type": "default", "rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4}
    },
    "llava": {"tower": "clip_vision_model", "text": "llama", "text_config": {"without": ["head_dim"]}},
    "locateanything": {"tower": "moonvit", "text": "qwen2", "tie_word_embeddings": True},
    "moondream3": {"num_key_value_heads": 4, "text_config": {"moe_start_layer": 1}},
    "step3p7": {
        "text_config": {
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 64,
            "share_expert_dims": 64,
            "moe_layers_enum": "1,2,3",
            **SLIDING,
        }
    },
    "minicpmv4_7": {"tower": "siglip", "text_config": QWEN, "image_token_id": 120, "video_token_id": 121, **QWEN},
    "fastvlm": {"text": "qwen2"},
    "ernie4_5_moe_vl": {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "text_config": {
            "hidden_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "moe_num_experts": [4, 4],
            "moe_intermediate_size": [64, 32],
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_capacity": [1.2, 2.0, 2.0],
        },
    },
}


def config_of(folder: str) -> Config:
    if folder not in FOLDERS:
        return _of_both(folder)
    own = copy.deepcopy(OWN.get(folder, {}))
    gone = own.pop("without", [])
    mine = own.pop("text_config", {})
    only = mine.pop("only", None)
    nested = [*gone, *mine.pop("without", [])]
    text = {**TEXT, "model_type": own.pop("text", folder), **mine}
    seeing = own.pop("vision_config", {})
    tower = own.pop("tower", folder)
    vision = seeing.get("only", {**TOWER, "model_type": tower, **seeing})
    top = {**text, "model_type": folder, **own}
    return {
        **{k: v for k, v in top.items() if k not in gone},
        "text_config": only
        if only is not None
        else {k: v for k, v in {**text, **own}.items() if k not in nested and k not in ("vit_config",)},
        "vision_config": vision,
    }


# What mlx-vlm's classes ask for beside what mlx-lm's do, of types in both; as in ``OWN``.
BOTH: dict[str, Config] = {
    "deepseek_v41": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "gemma3": {"tie_word_embeddings": True, "text_config": {"mm_tokens_per_image": 4, "rope_global_base_freq": 1e4}},
    "gemma3n": {"vision_config": {"model_type": "gemma3n_vision"}, "text_config": {"intermediate_size": [128] * 4}},
    "gemma4": {"tie_word_embeddings": True},
    "gemma4_text": {"tie_word_embeddings": True},
    "kimi_k25": {"vision_config": {"model_type": "moonvit"}},
    "kimi_k3": {"vision_config": {"model_type": "moonvit3d"}},
    "kimi_vl": {"vision_config": {"model_type": "moonvit"}},
    "llama4": {
        "vision_config": {
            "initializer_range": 0.02,
            "norm_eps": 1e-5,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "rope_theta": 1e4,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 64,
        }
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "shared_intermediate_size": 64,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        }
    },
    "mistral3": {"vision_config": {"model_type": "pixtral"}, "text_config": {"use_qk_norm": False}},
    "olmo": {"d_model": 64, "n_layers": 4, "n_heads": 4, "embedding_size": 128, "mlp_hidden_size": 128},
    "qwen3_5": {"text_config": QWEN},
    "qwen3_5_moe": {"text_config": QWEN},
}


def _of_both(folder: str) -> Config:
    """The configuration that ``zoo`` has for mlx-lm's type, as one part of a model with a tower."""
    own = copy.deepcopy(BOTH.get(folder, {}))
    gone, mine, seeing = own.pop("without", []), own.pop("text_config", {}), own.pop("vision_config", {})
    config = copy.deepcopy(CONFIGS.get(folder, {**BASE, "model_type": folder}))
    nested = config.pop("text_config", None)
    text = {**config, **(nested or {}), **own, **mine}
    return {
        **{k: v for k, v in {**config, **(nested or {}), **own, "model_type": folder}.items() if k not in gone},
        "text_config": {k: v for k, v in text.items() if k not in gone},
        "vision_config": {**TOWER, "model_type": folder, **seeing},
    }
