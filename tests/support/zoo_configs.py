"""One tiny ``config.json`` for each module of ``mlx_lm.models`` that has a ``Model``: see ``zoo``."""

from __future__ import annotations

import copy
from typing import Any

Config = dict[str, Any]

# fmt: off

# What most configurations have in common. ModelArgs.from_dict ignores the keys that it does not know.
BASE: Config = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qk_norm": True, "tie_word_embeddings": False,
}

# The names of the expert layers' settings: those of DeepSeek, Qwen and Mixtral.
MOE: Config = {
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "num_shared_experts": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# Multi-head latent attention.
MLA: Config = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}

# The lightning indexer of DeepSeek's sparse attention; it keeps fewer tokens than a prompt has.
INDEXER: Config = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 4}

# Gated delta net, as in Qwen3-Next.
DELTA: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
}

# Kimi delta attention; its layers count from one.
KDA: Config = {
    "linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 3]},
    "model_max_length": 512, "mla_use_nope": True, "num_expert_group": 1,
}

# Mamba 2 in the names of Granite 4.
MAMBA: Config = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True,
}

GRANITE: Config = {
    "logits_scaling": 2.0, "attention_multiplier": 0.2, "embedding_multiplier": 4.0, "residual_multiplier": 0.5,
}

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED: Config = {"layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 4}
WINDOW: Config = {"sliding_window": 4, "sliding_window_pattern": 2}
ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
YARN: Config = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPE_BY_TYPE: Config = {"rope_parameters": {FULL: YARN, SLIDING: ROPE}}
ALPHA_ROPE: Config = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
LLAMA4_ROPE: Config = {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}


def _config(*parts: Config, **settings: Any) -> Config:
    """The base configuration, changed by the parts in order, and then by the settings."""
    config = dict(BASE)
    for part in (*parts, settings):
        config.update(part)
    return config


def _nested(text_type: str, *parts: Config, **settings: Any) -> Config:
    """The configuration of a multimodal model, whose language model is described under ``text_config``."""
    return {"vocab_size": BASE["vocab_size"], "text_config": _config(*parts, model_type=text_type, **settings)}


def _gpt(**settings: Any) -> Config:
    """A configuration in the names of GPT-2."""
    names = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 128}
    return _config(names, **settings)


_BAILING: Config = {
    **MOE, "layer_group_size": 2, "group_norm_size": 1, "use_qkv_bias": True, "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid", "head_dim": 32,
}
_GEMMA4: Config = {
    **MOE, **MIXED, "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
    "num_key_value_heads": 1, "global_head_dim": 64, "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 64, "enable_moe_block": True, "top_k_experts": 2,
}
_LFM2: Config = {
    "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 192, "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "layer_types": ["conv", FULL, "conv", FULL],
}
_LLAMA4: Config = {
    **MOE, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 4, "rope_scaling": None, "no_rope_layers": [1, 1, 1, 0],
}
_LONGCAT: Config = {
    **MOE, **MLA, "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 128, "moe_topk": 2,
    "expert_ffn_hidden_size": 64, "zero_expert_num": 2, "num_layers": 3, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

_ARCHITECTURES: dict[str, Config] = {
    # Dense decoders whose layers are all alike
    **dict.fromkeys(
        ("bitnet", "ernie4_5", "gemma", "glm", "helium", "internlm2", "internlm3", "mimo", "nanochat", "olmo2", "qwen2",
         "qwen3", "seed_oss", "starcoder2", "talkie", "telechat3"), _config(),
    ),
    "apertus": _config(post_norm=True, qk_norm=True),
    "cohere": _config(logit_scale=0.5),
    "exaone": _config(num_layers=4, head_dim=16),
    "gemma2": _config(query_pre_attn_scalar=32.0),
    "glm4": _config(partial_rotary_factor=0.5),
    "gpt2": _gpt(),
    "gpt_bigcode": _gpt(num_key_value_heads=None),
    "gpt_neox": _config(num_key_value_heads=None, rotary_emb_base=10000, rotary_pct=0.25),
    "gptj": _gpt(rotary_dim=8),
    "granite": _config(GRANITE),
    "hunyuan_v1_dense": _config(ALPHA_ROPE),
    "lille-130m": _gpt(n_kv_heads=2, block_size=512),
    "minicpm": _config(dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    "nemotron": _config(hidden_act="relu2"),
    "phi": _config(partial_rotary_factor=0.5),
    "phi3": _config(partial_rotary_factor=0.5),
    "phi3small": _config(
        vocab_size=100352,  # it overwrites the logits of fixed tokens, out of bounds if there are fewer
        dense_attention_every_n_layers=2, ff_intermediate_size=128, gegelu_limit=20.0, blocksparse_block_size=32,
        blocksparse_num_local_blocks=2, blocksparse_vert_stride=2,
    ),
    "plamo": _config(n_shared_head=2),
    "qwen": _config(num_key_value_heads=None, kv_channels=16),
    "stablelm": _config(use_qkv_bias=True, partial_rotary_factor=0.25, qk_layernorm=True),
    # Dense decoders whose layers differ: in width, windows, rotation, shared keys and values, or passes
    "afm7": _config(hidden_dim=64, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    "baichuan_m1": _config(conv_window=2, sliding_window=4, sliding_window_layers=[0, 2], num_swa_attention_heads=2),
    "cohere2": _config(WINDOW, logit_scale=0.5, head_dim=16),
    "exaone4": _config(rope_scaling=None, sliding_window=4, sliding_window_pattern="LLLG"),
    "gemma3_text": _config(WINDOW, query_pre_attn_scalar=32),
    "gemma3n": _nested(
        "gemma3n_text", MIXED, rope_local_base_freq=10000.0, num_kv_shared_layers=2, vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=64, final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0], altup_num_inputs=2, altup_coef_clip=120.0,
        altup_correct_scale=True, altup_active_idx=0, laurel_rank=64,
    ),
    "iquestloopcoder": _config(loop_num=2, loop_window_size=4),
    "llama": _config(MIXED),
    "ministral3": _config(MIXED, LLAMA4_ROPE),
    "muse_glimmer": _config(MIXED),
    "nanbeige": _config(num_loops=2),
    "nemotron-nas": _config(
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.3125}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.625}},
        ]
    ),
    "olmo3": _config(MIXED),
    "openelm": _config(
        num_transformer_layers=4, model_dim=64, ffn_dim_divisor=64, num_query_heads=[2, 2, 4, 4],
        num_kv_heads=[1, 1, 2, 2], ffn_multipliers=[1.0, 2.0, 2.0, 3.0],
    ),
    "plamo3": _config(WINDOW),
    "smollm3": _config(no_rope_layers=[1, 1, 0, 1]),
    "spark2_5": _config(MIXED, ROPE_BY_TYPE),
    # Latent attention, dense
    "minicpm3": _config(MLA, rope_scaling=YARN, dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    "youtu_llm": _config(MLA),
    # Experts
    **dict.fromkeys(("Klear", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"), _config(MOE)),
    "afmoe": _config(MOE, MIXED, num_dense_layers=1),
    "bailing_moe": _config(_BAILING),
    "dbrx": _config(
        d_model=64, n_layers=4, n_heads=4, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek": _config(MOE),
    "dots1": _config(MOE),
    "ernie4_5_moe": _config(MOE, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1),
    "exaone_moe": _config(MOE, MIXED, is_moe_layer=[False, True, True, True]),
    "glm4_moe": _config(MOE, rope_scaling=None, partial_rotary_factor=0.5),
    "gpt_oss": _config(MOE, MIXED, intermediate_size=64),
    "granitemoe": _config(MOE, GRANITE),
    "hunyuan": _config(
        MOE, ALPHA_ROPE, moe_topk=2, num_shared_expert=1, use_mixed_mlp_moe=True, use_cla=True, cla_share_factor=2
    ),
    "laguna": _config(
        MOE, MIXED, ROPE_BY_TYPE, num_attention_heads_per_layer=[4, 2, 4, 2], moe_router_score_func="sqrtsoftplus"
    ),
    "llama4_text": _config(_LLAMA4),
    "mellum": _config(MOE, MIXED, ROPE_BY_TYPE),
    "mimo_v2_flash": _config(
        MOE, hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1], add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, sliding_window_size=4, layernorm_epsilon=1e-5, swa_rope_theta=1000.0,
        swa_num_attention_heads=4, swa_num_key_value_heads=4, v_head_dim=16, swa_head_dim=32, swa_v_head_dim=16,
        partial_rotary_factor=0.5,
    ),
    "minimax": _config(MOE, rotary_dim=16),
    "minimax_m3_vl": _nested(
        "minimax_m3", MOE, intermediate_size=64, dense_intermediate_size=128,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], layer_types=[FULL, "sparse", FULL, "sparse"],
        index_n_heads=2, index_head_dim=32, index_block_size=2, index_topk_blocks=2,
    ),
    "muse_spark": _nested(
        "muse_spark_text", MOE, MIXED, num_shared_experts=0, post_norm_eps=1e-8, rope_parameters=ROPE,
        layer_rope_theta=[10000.0, 0, 10000.0, 0], final_logit_softcapping=20.0, output_multiplier=0.2,
        moe_hidden_size=64,
    ),
    "phixtral": _config(MOE, num_vocab=128, model_dim=64, num_heads=4, num_layers=4, rotary_dim=8),
    "solar_open": _config(MOE, partial_rotary_factor=1.0),
    "step3p5": _config(
        MIXED, num_attention_groups=2, attention_other_setting={"num_attention_heads": 2, "num_attention_groups": 1},
        partial_rotary_factors=[1.0, 0.5, 1.0, 0.5], moe_num_experts=4, moe_top_k=2, moe_intermediate_size=64,
        share_expert_dim=64, moe_layers_enum="2,3", swiglu_limits=[0.0, 0.0, 0.0, 7.0],
    ),
    # Experts and latent attention
    "deepseek_v2": _config(MOE, MLA, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _config(MOE, MLA)),
    "deepseek_v32": _config(MOE, MLA, INDEXER),
    "deepseek_v41": _config(
        MOE, INDEXER, head_dim=64, q_lora_rank=64, qk_rope_head_dim=16, o_groups=2, o_lora_rank=64,
        scoring_func="sqrtsoftplus", sliding_window=4, compress_ratios=[0, 2, 2, 2], kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 2, 3], index_topk=2, candidate_source_layer_id=1, candidate_topk_blocks=2,
        candidate_block_size=2, hc_mult=2, hc_sinkhorn_iters=4,
    ),
    "glm_moe_dsa": _config(MOE, MLA, INDEXER, rope_parameters=ROPE),
    "longcat_flash": _config(_LONGCAT),
    "longcat_flash_ngram": _config(_LONGCAT, ngram_vocab_size_ratio=2, emb_neighbor_num=3, emb_split_num=2),
    "mistral4": _config(MOE, MLA, LLAMA4_ROPE),
    # Recurrent layers, or convolutions, alone or between attention layers
    "bailing_hybrid": _config(_BAILING, MLA, partial_rotary_factor=0.5),
    "bailing_moe_linear": _config(_BAILING),
    "bailing_moe_v3": _config(_BAILING, MLA, short_conv_kernel_size=4)
    | {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]},
    "falcon_h1": _config(MAMBA),
    "gear": _config(MIXED, layer_types=["conv_mixer", SLIDING, "conv_mixer", FULL]),
    "granitemoehybrid": _config(MOE, GRANITE, MAMBA, layer_types=["mamba", "attention", "mamba", "attention"]),
    "jamba": _config(
        MOE, MAMBA, mamba_expand=2, mamba_dt_rank=64, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1,
        expert_layer_period=2,
    ),
    "kimi_k3": _nested(
        "kimi_linear", MOE, MLA, KDA, attn_res_block_size=2, routed_expert_hidden_size=64, latent_moe_use_norm=True,
        mla_use_output_gate=True, activation_situ_beta=1.0,
    ),
    "kimi_linear": _config(MOE, MLA, KDA),
    "lfm2": _config(_LFM2),
    "lfm2_moe": _config(_LFM2, MOE, use_expert_bias=True, num_dense_layers=1),
    "mamba": _config(state_size=16, conv_kernel=4, use_conv_bias=True, time_step_rank=64),
    "mamba2": _config(
        num_heads=4, state_size=16, conv_kernel=4, n_groups=2, use_conv_bias=True, time_step_limit=[0.001, 100.0],
        time_step_rank="auto",
    ),
    "nemotron_h": _config(
        MOE, hybrid_override_pattern=["M", "*", "M", "E", "*", "-"], mamba_num_heads=4, mamba_head_dim=32,
        mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=2, use_conv_bias=True,
    ),
    "olmo_hybrid": _config(DELTA, linear_num_key_heads=4, linear_allow_neg_eigval=True),
    "plamo2": _config(hidden_size_per_head=32, mamba_num_heads=4, mamba_d_state=16),
    "prism_hadamard_qwen35": _nested("qwen3_5_text", DELTA, hidden_size=128, intermediate_size=512)
    | {
        "tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "block": block, "embedding": path.endswith("embed_tokens"), "dtype": "float16"}
            for path, block in [("model.embed_tokens", 0), ("lm_head", 0)]
            + [(f"model.layers.{layer}.mlp.down_proj", 512) for layer in range(4)]
        ],
    },
    "qwen3_5": _nested("qwen3_5_text", DELTA),
    "qwen3_5_moe": _nested("qwen3_5_moe_text", MOE, DELTA),
    "qwen3_next": _config(MOE, DELTA),
    "recurrent_gemma": _config(
        num_hidden_layers=6, block_types=["recurrent", "recurrent", "attention"], num_key_value_heads=1,
        conv1d_width=4, logits_soft_cap=30.0, attention_window_size=4,
    ),
    "rwkv7": _config(a_low_rank_dim=64, v_low_rank_dim=64, gate_low_rank_dim=64, decay_low_rank_dim=64),
    # The language models of multimodal ones
    "gemma3": _nested("gemma3_text", WINDOW, query_pre_attn_scalar=32),
    "gemma4": _nested("gemma4_text", _GEMMA4),
    "gemma4_text": _config(_GEMMA4),
    "kimi_k25": _nested("kimi_k2", MOE, MLA),
    "kimi_vl": _nested("deepseek_v3", MOE, MLA),
    "lfm2-vl": _nested("lfm2", _LFM2),
    "llama4": _nested("llama4_text", _LLAMA4),
    "mistral3": _nested("ministral3", MIXED, LLAMA4_ROPE),
    "pixtral": _nested("mistral"),
    "qwen2_vl": _nested("qwen2_vl_text"),
    "qwen3_vl": _nested("qwen3_vl_text"),
    "qwen3_vl_moe": _nested("qwen3_vl_moe_text", MOE),
}

# fmt: on

CONFIGS: dict[str, Config] = {
    name: copy.deepcopy({"model_type": name, **config}) for name, config in sorted(_ARCHITECTURES.items())
}

# Types that can be built anywhere, but run only on Metal.
NOT_ON_CPU: dict[str, str] = {
    "bitnet": "BitLinear is a Metal kernel: [metal_kernel] No Metal back-end.",
    "muse_spark": "its fused norms, routing and rotation are Metal kernels: [metal_kernel] No Metal back-end.",
}
RUNNABLE: list[str] = [name for name in CONFIGS if name not in NOT_ON_CPU]
# Modules with a Model, of which no model can be built.
NOT_CONSTRUCTIBLE: dict[str, str] = {
    "olmo": "importing it exits the process unless ai2-olmo is installed, and any prompt longer than a token fails, "
    "as the attention adds the mask 'causal' to the scores.",
}
