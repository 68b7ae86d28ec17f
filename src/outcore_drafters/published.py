"""How many tokens a pass a drafter gives: what was counted when it was trained, or what others published, until its
guesses were counted here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from outcore.checkpoint.checkpoint import Checkpoint
from outcore.checkpoint.identity import identity_of
from outcore.decode.speculative.acceptance import Rate
from outcore.errors import OutcoreError
from outcore.machine.cache_folder import cache_dir, keep_document
from outcore.machine.small_files import CONFIG_BYTES, parse_json, read_small
from outcore.plan.joint_plan import MOST

# Guesses after which their share of right ones takes the place of what was published.
ENOUGH = 20

# What ``draft train`` adds to a drafter's config: what it counted on held-out text. Other loaders ignore it.
TRAINED = "outcore_training"


@dataclass(frozen=True)
class Published:
    """Tokens a pass that were measured elsewhere, the model's own included.

    Attributes:
        guesses: how many were made for a pass.
        source: who measured what, on a project's public page; empty: ``draft train`` did, on held-out text.
    """

    least: float
    most: float
    guesses: int
    source: str

    @property
    def chance(self) -> float:
        """The chance of a guess to be right that gives the middle of these numbers, if it is the same for all."""
        low, high, wanted = 0.0, 1.0, (self.least + self.most) / 2
        for _ in range(40):
            chance = (low + high) / 2
            given = sum(chance**n for n in range(self.guesses + 1))
            low, high = (chance, high) if given < wanted else (low, chance)
        return low

    @property
    def about(self) -> str:
        if not self.source:
            return (
                f"measured when it was trained, on held-out text: {self.most:.2f} tokens a pass of up to "
                f"{self.guesses} guesses; your text may give fewer"
            )
        tokens = f"{self.least:g} to {self.most:g}" if self.least < self.most else f"{self.most:g}"
        return f"assumed, not measured: {tokens} tokens a pass of {self.guesses} guesses ({self.source})"


def trained_values(tokens: float, guesses: int) -> dict[str, Any]:
    """Returns what a drafter's config says of its training: tokens a pass on held-out text, of so many guesses."""
    return {TRAINED: {"tokens_a_pass": tokens, "guesses": guesses}}


def trained(config: Mapping[str, Any]) -> Published | None:
    """Returns what a drafter's config says of its training; None: nothing, or nothing that can be."""
    match config.get(TRAINED):
        case {"tokens_a_pass": float() as tokens, "guesses": int() as guesses} if (
            1 <= tokens <= guesses + 1 and 0 < guesses <= MOST
        ):
            return Published(tokens, tokens, guesses, "")
    return None


# By whether a drafter guesses blocks, and whether the model is quantized.
PUBLISHED = {
    (True, False): Published(5.4, 5.4, 7, "xLLM-AI/xllm pull request 2279: DFlash2 for Qwen3.8 27B, GSM8K, sampled"),
    (True, True): Published(2.2, 3.3, 7, "z-lab/dflash issue 170: DFlash2 for Qwen3.8 27B in 6 bits, llama.cpp"),
    # sgl-project/sglang pull request 4247 has 4.7 (Llama 3.1 8B), vllm-project/vllm pull request 42764 2.3 (gpt-oss).
    (False, False): Published(3.0, 4.0, 5, "EAGLE-3, between what engines tell of 8B and 20B models"),
    (False, True): Published(3.0, 4.0, 5, "EAGLE-3, between what engines tell of 8B and 20B models, not quantized"),
}


def seen_file(model: Checkpoint, drafter: Path, bits: int | None) -> Path | None:
    """Returns the file in the cache for what a model's drafter gave; None if there can be none."""
    with suppress(OSError, OutcoreError):
        files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in drafter.glob("*.safetensors"))
        about = [identity_of(model), (drafter / "config.json").read_text(encoding="utf-8"), files, bits]
        return cache_dir() / "drafts-seen" / f"{xxhash.xxh64_hexdigest(json.dumps(about).encode())}.json"
    return None


def keep(file: Path | None, guesses: Rate | None) -> None:
    """Records the share of right guesses, if there were enough."""
    if file is not None and guesses is not None and guesses.all >= ENOUGH:
        with suppress(OSError, OutcoreError):
            keep_document(file, {"right": guesses.value})


def seen_chance(file: Path | None) -> float | None:
    """Returns the share of a drafter's guesses that were right here; None: they were not counted."""
    with suppress(OSError, ValueError):
        found = None if file is None else parse_json(read_small(file, CONFIG_BYTES))
        right = found.get("right") if isinstance(found, dict) else None
        if isinstance(right, float) and 0 <= right < 1:
            return right
    return None
