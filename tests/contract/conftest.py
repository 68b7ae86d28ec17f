"""What the contract tests share: tiny models, mlx-lm's answers of them, and a tokenizer that has no text. Nothing here
imports anything but what ``outcore`` exports."""

from __future__ import annotations

import runpy
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import outcore
import zoo

Answer = list[tuple[int, bytes]]
"""Of each token its id, and the bits of all log-probabilities that it was chosen by."""


class NoText(TokenizerWrapper):
    """As much of a tokenizer as generating tokens takes."""

    bos_token = None
    eos_token_ids = frozenset[int]()
    last_segment = text = ""

    def __init__(self) -> None: ...

    @property
    def detokenizer(self) -> Any:
        return self

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


def told(responses: Iterator[Any]) -> Answer:
    return [(r.token, np.array(r.logprobs.astype(mx.float32)).tobytes()) for r in responses]


@dataclass
class Models:
    """Checkpoints of the zoo, each made once, and what mlx-lm says with them."""

    base: Path
    no_text: NoText = field(default_factory=NoText)

    def folder(self, name: str, **config: Any) -> Path:
        """Of a type; ``config``: with these values in its configuration."""
        folder = self.base / f"{name}-{zlib.crc32(repr(config).encode())}"
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(zoo.CONFIGS, name, zoo.CONFIGS[name] | config)
                zoo.save_checkpoint(name, folder)
        return folder

    def with_experts(self) -> Path:
        """A hybrid with 16 experts a layer, 4 of them for each token."""
        text = zoo.CONFIGS["qwen3_5_moe"]["text_config"] | {
            "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 128, "moe_intermediate_size": 128,
            "mlp_only_layers": [],
        }  # fmt: skip
        return self.folder("qwen3_5_moe", text_config=text)

    def theirs(self, folder: Path, prompt: list[int], tokens: int, **how: Any) -> Answer:
        """By mlx-lm, all of the model in memory."""
        model, _ = mlx_lm.utils.load_model(folder)
        return told(mlx_lm.stream_generate(model, self.no_text, prompt, max_tokens=tokens, **how))

    def ours(self, model: Any, prompt: list[int], tokens: int, **how: Any) -> Answer:
        return told(outcore.stream_generate(model, self.no_text, prompt, max_tokens=tokens, **how))

    def smallest(self, folder: Path, **options: Any) -> int:
        """The smallest budget that works, as the refusal of none says."""
        with pytest.raises(outcore.BudgetError) as refused:
            outcore.plan_model(folder, memory=1, **options)
        assert refused.value.smallest is not None
        return refused.value.smallest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("contract"))


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    """``outcore.load_model`` without drafts, for short texts; what it loads is closed by the end of the test."""
    open_models: list[Any] = []

    def loaded(folder: Path, **options: Any) -> Any:
        given = {"memory": "1GB", "context": 256, "prompt": 64, "draft": "none"} | options
        model = outcore.load_model(folder, **given)[0]
        open_models.append(model)
        return model

    yield loaded
    for model in open_models:
        model.outcore.close()


@pytest.fixture
def outcore_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, str, str]]:
    """``python -m outcore`` with some words, in this process: its exit status, and what it wrote."""

    def run(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["outcore", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("outcore", run_name="__main__")
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run
