"""Tiny random models of mlx-vlm's types that read images, with the processors that real ones of their types have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import vision_zoo
from vision_configs import config_of

Config = dict[str, Any]

TOKENS = [
    "<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]",
    "[IMG_BREAK]", "[IMG_END]", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "[INST]", "[/INST]",
]  # fmt: skip
IDS = {token: 256 + n for n, token in enumerate(TOKENS)}
VOCABULARY = 288

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN: Config = {
    "image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"],
}  # fmt: skip
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_SIZES: Config = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}


def save_tokenizer(folder: Path, mark: str, **names: str) -> None:
    """A tokenizer of bytes; ``names``: attributes of the tokenizer that name its special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens=names,
    )  # fmt: skip
    fast.chat_template = TEMPLATE.replace("MARK", mark)
    fast.save_pretrained(folder)
    for file in ("tokenizer_config.json",):
        said = json.loads((folder / file).read_text())
        said["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / file).write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text(fast.chat_template)


def text_of(config: Config) -> Config:
    text: Config = config.get("text_config") or config.get("llm_config") or {}
    return text


def qwen(kind: str, patch: int, deep: tuple[int, ...] = ()) -> Callable[[Path], Config]:
    """``deep``: the blocks whose features are added after the first layers."""

    def config(folder: Path) -> Config:
        found = config_of(kind)
        found |= QWEN
        found["vision_config"] |= {
            "patch_size": patch,
            "depth": 4,
            "in_channels": 3,
            "deepstack_visual_indexes": list(deep),
        }
        save_tokenizer(folder, QWEN_MARK)
        sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, **QWEN_SIZES}
        write(folder, "preprocessor_config.json", sizes)
        return found

    return config


def write(folder: Path, name: str, said: Config) -> None:
    (folder / name).write_text(json.dumps(said))


def gemma3(folder: Path) -> Config:
    found = config_of("gemma3")
    found |= {"image_token_index": IDS["<image_soft_token>"], "pad_token_id": IDS["<pad>"]}
    found["text_config"] |= {"mm_tokens_per_image": 4, "sliding_window": 16, "sliding_window_pattern": 2}
    found["vision_config"] |= {"model_type": "siglip_vision_model", "image_size": 56, "num_hidden_layers": 3}
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    save_tokenizer(folder, "<start_of_image>", **names)
    sides = {"height": 56, "width": 56}
    write(folder, "preprocessor_config.json", {"image_processor_type": "Gemma3ImageProcessor", "size": sides})
    write(folder, "processor_config.json", {"image_seq_length": 4})
    return found


def pixtral(folder: Path) -> Config:
    found = config_of("pixtral")
    found |= {"image_token_index": IDS["[IMG]"]}
    found["vision_config"] |= {"head_dim": 32, "num_hidden_layers": 3, "image_size": 70}
    save_tokenizer(folder, "[IMG]")
    sizes = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 70}}
    write(folder, "preprocessor_config.json", sizes)
    write(folder, "processor_config.json", {"patch_size": 14})
    return found


def mistral3(folder: Path) -> Config:
    found = config_of("mistral3")
    found |= {"image_token_index": IDS["[IMG]"], "spatial_merge_size": 1, "vision_feature_layer": -1}
    found["vision_config"] |= {"model_type": "pixtral", "head_dim": 32, "num_hidden_layers": 3, "image_size": 70}
    save_tokenizer(folder, "[IMG]")
    sizes = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 70}}
    write(folder, "preprocessor_config.json", sizes)
    write(folder, "processor_config.json", {"patch_size": 14, "spatial_merge_size": 1})
    return found


def internvl(folder: Path) -> Config:
    found = config_of("internvl_chat")
    found |= {"image_token_index": IDS["<IMG_CONTEXT>"], "force_image_size": 56, "max_dynamic_patch": 4}
    found["vision_config"] |= {"image_size": 56, "num_hidden_layers": 3}
    save_tokenizer(folder, "<image>\n")
    write(folder, "preprocessor_config.json", {})
    return found


def llava(folder: Path) -> Config:
    found = config_of("llava")
    found |= {"image_token_index": IDS["<image>"]}
    found["vision_config"] |= {"image_size": 56, "num_hidden_layers": 3}
    save_tokenizer(folder, "<image>\n", image_token="<image>")
    sides = {"height": 56, "width": 56}
    sizes = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": sides}
    write(folder, "preprocessor_config.json", sizes)
    said = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    write(folder, "processor_config.json", said | {"image_token": "<image>"})
    return found


MARKS = {
    "gemma3": "<start_of_image>", "pixtral": "[IMG]", "mistral3": "[IMG]", "internvl_chat": "<image>\n",
    "llava": "<image>\n",
}  # fmt: skip


def prompt_of(kind: str, images: int, question: str = "what is it?") -> str:
    mark = MARKS.get(kind, QWEN_MARK)
    return f"<|im_start|>user\n{mark * images}{question}<|im_end|>\n<|im_start|>assistant\n"


FAMILIES: dict[str, Callable[[Path], Config]] = {
    "gemma3": gemma3,
    "internvl_chat": internvl,
    "llava": llava,
    "mistral3": mistral3,
    "pixtral": pixtral,
    "qwen2_5_vl": qwen("qwen2_5_vl", 14),
    "qwen2_vl": qwen("qwen2_vl", 14),
    "qwen3_5": qwen("qwen3_5", 16),
    "qwen3_5_moe": qwen("qwen3_5_moe", 16),
    "qwen3_vl": qwen("qwen3_vl", 16, (0, 2)),
    "qwen3_vl_moe": qwen("qwen3_vl_moe", 16, (0, 2)),
}


def save_model(kind: str, folder: Path, side: int | None = None, vision: Config | None = None) -> Path:
    """Writes a model. ``side``: of the largest pictures of Qwen's kind; ``vision``: other sizes of its tower."""
    folder.mkdir(parents=True)
    config = FAMILIES[kind](folder)
    config["vision_config"] |= vision or {}
    if side is not None:
        said = json.loads((folder / "preprocessor_config.json").read_text())
        write(folder, "preprocessor_config.json", said | {"max_pixels": side * side})
    text_of(config)["vocab_size"] = VOCABULARY
    config["vocab_size"] = VOCABULARY
    before = vision_zoo.config_of
    vision_zoo.config_of = lambda folder: config
    try:
        return vision_zoo.save_checkpoint(kind, folder, towers=True)
    finally:
        vision_zoo.config_of = before


def pictures(count: int, side: int = 70) -> list[Any]:
    """Random images of different sizes."""
    from PIL import Image

    draw = np.random.default_rng(5)
    sizes = [(side + 13 * n, side + 9 * (count - n)) for n in range(count)]
    return [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]


def theirs(folder: Path, prompt: str, images: list[Any], tokens: int) -> tuple[list[int], list[mx.array], list[int]]:
    """The tokens that mlx-vlm writes, their log-probabilities, and the prompt's ids."""
    import mlx_vlm.utils
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load_image_processor, load_processor, prepare_inputs

    model = mlx_vlm.utils.load_model(folder)
    processor: Any = load_processor(folder, add_detokenizer=False)
    if (own := load_image_processor(folder)) is not None:
        processor.image_processor = own
    try:
        inputs = dict(prepare_inputs(processor, images=images, prompts=[prompt], add_special_tokens=False))
    except ValueError:  # LLaVA's takes no other arguments
        inputs = dict(processor(images=images, text=[prompt]))
    ids, pixels, mask = inputs.pop("input_ids"), inputs.pop("pixel_values"), inputs.pop("attention_mask")
    given = {k: v for k, v in inputs.items() if v is not None}
    found, scores = [], []
    for token, logprobs in generate_step(ids, model, pixels, mask, max_tokens=tokens, temperature=0.0, **given):
        found.append(token)
        scores.append(logprobs)
    mx.eval(scores)
    return found, scores, ids[0].tolist()
