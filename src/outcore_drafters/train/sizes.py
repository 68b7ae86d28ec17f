"""Sizes of a training: its drafter's, and the bytes that it takes in memory and on disk."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.errors import UsageError
from outcore.machine.device import on_cpu

from ..config import config_of
from .collect import LIKELY
from .network import PIECE, Shape
from .products import CODE_BITS
from .training import DEPTH

# Bits of a drafter's weight when it drafts, with scales and biases of groups of 64.
WEIGHT_BITS = CODE_BITS + 2 * 16 / 64

# A drafter's inner width for the model's width, if the user asks for no size: the least of those that were trained to
# anything like their end, as 1.1 and 1.9 times the bytes gave no more tokens a pass (dev/log/drafts.md).
WIDTH = 11 / 3

# Evaluations of a training at most, after each of which weights are saved.
SAVES = 20


def sizes_of(folder: Path) -> dict[str, Any]:
    """Returns the part of a model's config that has the text model's sizes."""
    config = config_of(folder)
    return config.get("text_config") or config


def beside_bytes(folder: Path) -> int:
    """Returns the bytes beside the model while states are collected: its embeddings and output head as training needs
    them, and a matrix of that size that is dequantized for a product."""
    sizes, tables = sizes_of(folder), tables_of(folder)
    values = sizes.get("vocab_size", 0) * sizes.get("hidden_size", 0)
    return int(values * (4 * tables + 6 if on_cpu() else 2 * tables + 4))


def tables_of(folder: Path) -> int:
    """Returns 2 for a model whose output head is not its embeddings; else 1."""
    return 1 + any(name.endswith("lm_head.weight") for name in open_checkpoint(folder).tensors)


def usual_width(hidden: int) -> int:
    """Returns the inner width of a drafter for a model of this width."""
    return max(64, int(WIDTH * hidden) // 64 * 64)


def drafter_shape(folder: Path, hidden: int, vocabulary: int, layers: int, share: float | None) -> Shape:
    """Returns the drafter's shape for a model with these sizes.

    Args:
        folder: of the model.
        share: of the model's bytes that the drafter takes; None: of the model's width.

    Raises:
        UsageError: the share is too small, or the model has too few layers.
    """
    head_dim = 64 if hidden < 1024 else 128
    heads = max(1, hidden // head_dim)
    kv_heads = next(n for n in range(max(1, heads // 4), heads + 1) if heads % n == 0)
    last = layers - 1
    if last < 2:
        raise UsageError(f"{folder}: a drafter reads three layers; this model has {layers}")
    shape = Shape(hidden, heads, kv_heads, head_dim, 64, vocabulary, (last // 5, last * 3 // 5, last))
    width = float(usual_width(hidden))
    if share is not None:
        model = open_checkpoint(folder).nbytes
        width = (share * model * 8 / WEIGHT_BITS - shape.parameters) / (3 * hidden) + 64
        if width < 64:
            least = drafter_bytes(shape) / model
            raise UsageError(f"--share {share}: give at least {math.ceil(least * 1000) / 1000}")
    return dataclasses.replace(shape, intermediate=int(min(width, max(64, 8 * hidden))) // 64 * 64)


def fitted(shape: Shape, room: int, length: int) -> Shape:
    """Returns the shape, less wide inside where ``room`` bytes are too few to train it, down to the model's width."""
    for inner in range(shape.intermediate, min(shape.hidden, shape.intermediate) - 1, -64):
        shape = dataclasses.replace(shape, intermediate=inner)
        if sum(step_bytes(shape, length, 1)) <= room:
            break
    return shape


def drafter_bytes(shape: Shape) -> float:
    """Returns the bytes of a drafter in 4 bits."""
    return shape.parameters * WEIGHT_BITS / 8


def text_bytes(hidden: int, length: int) -> int:
    """Returns the bytes of what is collected of a text of ``length`` tokens, by a model of this width."""
    return length * (3 * hidden * 2 + 4 + 6 * LIKELY)


def step_bytes(shape: Shape, length: int, texts: int) -> tuple[int, int]:
    """Returns the bytes that a training step takes beside the model's tables, and those for each of its texts.

    Args:
        length: tokens of a text.
        texts: how many a file of states has.
    """
    # Weights and the optimizer's two averages; weights as quantized, or gradients; and of the largest matrix what the
    # optimizer makes. Seen on a CPU: 4.6.
    fixed = 6 * 4 * shape.parameters + 3 * 4 * PIECE + texts * text_bytes(shape.hidden, length)
    # For each place, floats of every guess that its gradient needs; on a CPU also what they were made of.
    guess = 24 * shape.hidden + 6 * shape.intermediate + 5 * shape.heads * length
    each = 4 * length * (DEPTH * guess + 12 * shape.hidden)
    return fixed, 4 * each if on_cpu() else each


def disk_shares(disk: int, parameters: int) -> tuple[int, int]:
    """Returns how many of the bytes that may be written are for states (negative: they are too few), and how often
    weights are saved."""
    # Each time the best weights, and the last with the optimizer's two averages; at the end the drafter in bfloat16.
    saved, drafter = parameters * 4 * 4, parameters * 2
    weights = max(disk // 2, 2 * saved + drafter)
    return disk - weights, min(SAVES, (weights - drafter) // saved)
