"""Model shapes for synthetic checkpoints: name -> what config.json would say.

Only what mlx-lm reads to build a model is here (plus `layer_types`, which other tools read). The names are the
published ones in lower case; `*-tiny` shapes are for tests.

Where the Qwen3.5 numbers come from
    Known, from published config.json files and model cards: the vocabulary of 248,320; head_dim 256; full attention in
    every fourth layer; linear-attention heads of 128 with 16 key heads and a convolution of 4; for 0.8B, 4B, 9B and
    27B hidden, intermediate, heads and linear value heads; a head of their own on 9B and 27B, tied on the small
    ones; of 35B-A3B 40 layers, hidden 2048, 256 routed experts, 8 used, and one shared.
    Fitted: 2B's intermediate, heads and value heads; 35B-A3B's heads, value heads and 512-wide experts.
    The check: parameters here plus vision tower and multi-token prediction (which mlx-lm drops on loading, and are not
    here) give the totals that the Hub shows: 0.87, 2.27, 4.66 and 9.65 billion for 0.8B, 2B, 4B and 9B.
    Bytes of tensors, quantized as mlx_lm.convert does, group size 64: 0.8B 8-bit 0.800 GB, 2B 8-bit 2.000, 4B 4-bit
    2.367, 9B 8-bit 9.514, 27B 4-bit 15.133, 35B-A3B 4-bit 19.509. Sizes that others quote (0.80, 1.93, 2.34, 8.97,
    14.34 "GB") lie 1 to 7 % above ours in GiB and 0 to 6 % below in GB; the shapes are not bent to meet them.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

VOCAB = 248_320


def layer_types(layers: int, interval: int = 4) -> list[str]:
    """What each layer is: full attention in every `interval`-th one, linear in the others."""
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]


def qwen35(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
    key_heads: int = 16,
    head_dim: int = 256,
    linear_head_dim: int = 128,
    vocab: int = VOCAB,
    moe: Config | None = None,
) -> Config:
    """A Qwen3.5 config: dense, or with routed experts where `moe` has their keys."""
    family = "qwen3_5_moe" if moe else "qwen3_5"
    text: Config = {
        "model_type": f"{family}_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": layer_types(layers),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear_head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
        **(moe or {}),
    }
    architecture = "Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"
    return {"architectures": [architecture], "model_type": family, "text_config": text, "tie_word_embeddings": tied}


def llama(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool
) -> Config:
    """A Llama 3 config."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131_072,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }


def experts(count: int, used: int, width: int) -> Config:
    """The keys of a mixture of `count` routed experts and one shared, all `width` wide."""
    return {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_experts": count,
        "num_experts_per_tok": used,
        "shared_expert_intermediate_size": width,
    }


SHAPES: dict[str, Config] = {
    "qwen3.5-0.8b": qwen35(hidden=1024, intermediate=3584, layers=24, heads=8, kv_heads=2, value_heads=16, tied=True),
    "qwen3.5-2b": qwen35(hidden=2048, intermediate=6144, layers=24, heads=8, kv_heads=2, value_heads=16, tied=True),
    "qwen3.5-4b": qwen35(hidden=2560, intermediate=9216, layers=32, heads=16, kv_heads=4, value_heads=32, tied=True),
    "qwen3.5-9b": qwen35(hidden=4096, intermediate=12288, layers=32, heads=16, kv_heads=4, value_heads=32, tied=False),
    "qwen3.5-27b": qwen35(hidden=5120, intermediate=17408, layers=64, heads=24, kv_heads=4, value_heads=48, tied=False),
    "qwen3.5-35b-a3b": qwen35(
        hidden=2048,
        intermediate=512,
        layers=40,
        heads=16,
        kv_heads=2,
        value_heads=32,
        tied=False,
        moe=experts(256, 8, 512),
    ),
    "llama-4gb": llama(
        hidden=2048, intermediate=8192, layers=32, heads=32, kv_heads=8, head_dim=64, vocab=32_000, tied=False
    ),
    "llama-3.2-1b": llama(
        hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128_256, tied=True
    ),
    "llama-3.1-8b": llama(
        hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256, tied=False
    ),
    "llama-tiny": llama(
        hidden=128, intermediate=256, layers=4, heads=4, kv_heads=2, head_dim=32, vocab=512, tied=False
    ),
    "qwen3.5-tiny": qwen35(
        hidden=128,
        intermediate=256,
        layers=4,
        heads=4,
        kv_heads=2,
        value_heads=4,
        key_heads=2,
        head_dim=32,
        linear_head_dim=32,
        vocab=512,
        tied=True,
    ),
    "qwen3.5-moe-tiny": qwen35(
        hidden=128,
        intermediate=64,
        layers=4,
        heads=4,
        kv_heads=2,
        value_heads=4,
        key_heads=2,
        head_dim=32,
        linear_head_dim=32,
        vocab=512,
        tied=False,
        moe=experts(8, 2, 64),
    ),
}

# Configs of drafters for the 27B, for ``outcore plan``: five layers of its width as DFlash's, 3.46 GB in bf16 as
# published, and one layer with a head of 32,000 tokens as EAGLE-3's.
_LAYER: Config = {
    "dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
}
DRAFTERS: dict[str, Config] = {
    "dflash-27b": {
        **_LAYER,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": 64,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
    },
    "eagle3-27b": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32_000,
        "eagle_aux_hidden_state_layer_ids": [3, 32, 61],
        "transformer_layer_config": {**_LAYER, "model_type": "llama", "num_hidden_layers": 1},
    },
}
