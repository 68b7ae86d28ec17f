"""The files of a synthetic checkpoint: safetensors in shards with their index, config.json, a byte-level tokenizer.

Headers are computed from shapes and the data is streamed. Everything is written to `OUT_DIR/.partial` and moved out at
the end, config.json last: a folder with a config.json is whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mlx_lm.utils import save_config
from rich.progress import Progress
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from random_weights import DTYPES, Blocks, Tensor
from shapes import Config

Layout = Literal["hash", "layer", "hf"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class MakeError(Exception):
    """A checkpoint that cannot be made. The message is one line and says what to do."""


def split_shards(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Tensors in order, in shards of at most `limit` bytes or one tensor, as `mlx_lm.utils.make_shards` splits."""
    shards: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def arrange(shard: list[Tensor], layout: Layout, salt: str) -> list[Tensor]:
    """The order of a shard's tensors in its file."""
    if layout == "layer":
        return shard
    ordered = sorted(shard, key=lambda t: t.name)
    if layout == "hash":
        random.Random(salt).shuffle(ordered)
        return ordered
    rank = list(DTYPES.values())
    return sorted(ordered, key=lambda t: -rank.index(t.dtype))


def header_of(tensors: list[Tensor], layout: Layout) -> bytes:
    """A safetensors header with its length in front.

    `mx.save_safetensors` (looked at in 0.32.4) sorts names and keys and does not pad, so that data starts at any byte;
    the `safetensors` library pads with spaces to a multiple of 8. The `hf` layout does the latter.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for t in tensors:
        end = offset + t.nbytes
        entries[t.name] = {"data_offsets": [offset, end], "dtype": t.dtype, "shape": list(t.shape)}
        offset = end
    text = json.dumps(dict(sorted(entries.items())), separators=(",", ":")).encode()
    if layout == "hf":
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, header: bytes, tensors: list[Tensor], blocks: Blocks, wrote: Callable[[int], None]) -> None:
    """Streams one safetensors file to disk and syncs it; `wrote` is told of each piece's bytes."""
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for piece in blocks.chunks(tensor):
                file.write(piece)
                wrote(len(piece))
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer that fills the vocabulary: 256 bytes, the special tokens, then ` 259`, ` 260`, ...

    The fillers are never the result of encoding, as there are no merges; a random model's output decodes to numbers.
    Their letters are all in the byte alphabet, which mlx-lm's streaming detokenizer relies on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *SPECIALS])}
    vocab.update((f"Ġ{i}", i) for i in range(len(vocab), vocab_size))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262_144,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_checkpoint(
    folder: Path,
    config: Config,
    tensors: list[Tensor],
    *,
    shard_size: int,
    layout: Layout,
    seed: int,
    progress: Progress,
) -> tuple[int, int]:
    """Writes the whole model folder.

    Returns:
        Bytes of the safetensors files, and their number.

    Raises:
        MakeError: the folder is not empty, or the disk has not enough room.
    """
    made = not folder.exists()
    partial = folder / ".partial"  # inside, as the folder may be a mount point of its own
    if not made and any(path != partial for path in folder.iterdir()):
        raise MakeError(f"{folder} is not empty; remove it or name another folder")
    shards = split_shards(tensors, shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    shards = [arrange(shard, layout, f"{seed}:{name}") for shard, name in zip(shards, names, strict=True)]
    total = sum(t.nbytes for t in tensors)
    size = total + sum(len(header_of(shard, layout)) for shard in shards)
    if partial.exists():
        shutil.rmtree(partial)
    room = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if room < size + 100_000_000:  # the tokenizer, and some air
        raise MakeError(f"{folder} needs {size / 1e9:.2f} GB and its disk has {room / 1e9:.2f} GB free; free some")
    partial.mkdir(parents=True)
    try:
        task = progress.add_task(folder.name, total=total)
        blocks = Blocks(seed)
        for name, shard in zip(names, shards, strict=True):
            write_shard(partial / name, header_of(shard, layout), shard, blocks, lambda n: progress.advance(task, n))
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
        write_tokenizer(partial, config.get("text_config", config)["vocab_size"])
        save_config(config, partial / "config.json")
        for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial)
        if made and not any(folder.iterdir()):
            folder.rmdir()
    return size, len(shards)
