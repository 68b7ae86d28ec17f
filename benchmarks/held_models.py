"""Tiny random models, held in memory in random ways, each beside the resident one that it must equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.utils

import _support  # noqa: F401
import outcore
import zoo

TYPES = (
    "llama", "qwen3", "qwen3_5", "qwen3_5_moe", "gemma2", "gemma3_text", "mamba2", "rwkv7", "gpt_oss", "deepseek_v3",
    "nemotron_h", "recurrent_gemma", "falcon_h1", "lfm2", "jamba", "gemma3n", "nanbeige", "llama4", "plamo2", "exaone4",
)  # fmt: skip
"""Every kind of cache and of layer: full, sliding and chunked attention, states, layers that are called twice."""


EXPERTS = ("qwen3_5_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "jamba", "llama4")
"""Those that have experts, which are held one by one in most rounds."""


@dataclass
class Model:
    """A model that rounds run on, and the resident one that it must equal."""

    name: str
    model: nn.Module
    theirs: nn.Module
    options: dict[str, Any]


@dataclass
class Models:
    """Models on disk and loaded, made when first asked for."""

    folder: Path
    types: Sequence[str]
    theirs: dict[str, nn.Module] = field(default_factory=dict)

    def draw(self, rng: random.Random) -> Model:
        """A random model, held in memory in a random way."""
        name = rng.choice(list(self.types))
        path = self.folder / name
        if name not in self.theirs:
            zoo.save_checkpoint(name, path)
            self.theirs[name] = mlx_lm.utils.load_model(path)[0]
        options: dict[str, Any] = {
            "context": 256,
            "prompt": 64,
            "govern": False,
            "resumable": True,
            "io": rng.choice(["direct", "cached"]),
        }
        if name in EXPERTS and rng.random() < 0.6:
            options["experts"] = rng.choice([1, 2, 3])
        elif (resident := rng.choice([0, 0, 1, None])) is not None:
            options["resident"] = resident
        if rng.random() < 0.5:
            options["slots"] = 2
        options["draft"] = "ngram" if rng.random() < 0.4 else "none"
        memory: int | str = "1GB"
        if options.get("resident") == 0 and rng.random() < 0.5:
            # The least that works: parts of layers, and a head in slices.
            del options["resident"]
            memory = 1
        for _ in range(3):
            try:
                model, _config = outcore.load_model(path, memory=memory, **options)
                return Model(name, model, self.theirs[name], {"memory": memory, **options})
            except outcore.BudgetError as e:
                # A window that is gone back to with a long prompt, and chunks that a text asks for, may take more.
                memory = int(1.3 * (e.smallest or 1))
        raise AssertionError(f"{name}: what was said to be the smallest budget was refused")
