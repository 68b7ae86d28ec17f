"""Model folders of mlx-vlm 0.7.10 whose types mlx-lm 0.32.2 lacks, and other names of types.

So an error can say what is missing while mlx-vlm is not installed.
"""

FOLDERS = {
    "aya_vision", "bert", "bonsai", "clef", "cohere2_moe", "cohere_compass", "colidefics3", "colqwen2_5", "d1",
    "d1_omni", "decider2", "deepseek_v4", "deepseek_vl_v2", "deepseekocr", "deepseekocr_2", "diffusion_gemma",
    "dinov2", "dots_ocr", "embedding_gemma2", "ernie4_5_moe_vl", "ernie_image", "falcon_ocr", "falcon_perception",
    "fastvlm", "flint", "florence2", "flux2", "flux3", "gemma3_embedding", "gemma4_unified", "gliner2_5", "glm4v",
    "glm4v_moe", "glm5_next", "glm_ocr", "got", "granite4_vision", "granite_vision", "hrm_text", "hunyuan_vl",
    "hy_v4", "idefics2", "idefics3", "ideogram4", "indic_ocr", "inkling", "internvl", "internvl_chat", "jina_vlm",
    "k2_horizon", "klear", "kolibri1", "laya", "lfm2_colbert", "lfm2_embedding", "lfm2_encoder", "lfm2_vl",
    "lille_130m", "limite", "llada2_moe", "llada_image", "llama_bidirec", "llama_nemotron_vl_embedding", "llava",
    "llava_bunny", "llava_next", "llava_onevision", "llmjpvl", "locateanything", "longcat_flash_sparse",
    "mage_flow", "mage_vl", "mimo_v2", "ming_image", "minicpmo", "minicpmv4_6", "minicpmv4_7", "minimax_h3",
    "minimax_m3", "ministral3_embedding", "mistral_large3", "mllama", "modernbert", "moge3", "molmo", "molmo2",
    "molmo_point", "moondream2", "moondream3", "moss_image", "multi_modality", "nemotron_h_nano_omni",
    "nemotron_labs_diffusion", "nemotron_nas", "nemotron_parse", "nemotron_voicechat", "openai_privacy_filter",
    "paddleocr_vl", "paligemma", "phi3_v", "phi4_siglip", "phi4mm", "plamo2vl", "pp_doclayout_v3", "qwen2_5_vl",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_embedding", "qwen3_omni_moe", "qwen3_vl_embedding", "qwen4_exp",
    "qwen_image", "rfdetr", "rt_detr_v2", "sam3", "sam3_1", "sam3d_body", "sam3d_objects", "sapiens2", "siglip",
    "smolvlm", "step3p7", "unlimited_ocr", "video_depth_anything", "xing4_0", "xlm_roberta", "yolo11", "youtu_vl",
    "z1t", "z_image", "zaya1_vl",
}  # fmt: skip

RENAMED = {
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
    "cohere2moe": "cohere2_moe",
    "falcon-perception": "falcon_perception",
    "granite-vision": "granite_vision",
    "granite4-vision": "granite4_vision",
    "inkling_mm_model": "inkling",
    "jvlm": "jina_vlm",
    "lfm2-vl": "lfm2_vl",
    "lille-130m": "lille_130m",
    "llava-qwen2": "llava_bunny",
    "llava_qwen2": "fastvlm",
    "moondream1": "moondream2",
    "muse_spark_open": "muse_spark",
    "nemotron-nas": "nemotron_nas",
    "nemotron_h_omni": "nemotron_h_nano_omni",
    "nemotron_h_puzzle": "nemotron_h",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h_nano_omni",
    "phi4-siglip": "phi4_siglip",
    "unlimited-ocr": "unlimited_ocr",
}
