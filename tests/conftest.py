from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import mlx.core as mx
import pytest

import zoo


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed copies go to a folder of the test's own."""
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "outcore-cache"))


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """No test leaves a reader thread behind, and none leaves MLX's limits changed for the next."""
    memory = mx.set_memory_limit(2**40)
    mx.set_memory_limit(memory)
    yield
    if _threads():
        gc.collect()  # models that were not closed; not after every test, as it takes 0.1 s
    mx.set_memory_limit(memory)
    assert not _threads(), f"threads left running: {_threads()}"


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("outcore-")]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained model that ships inside the package: 16 layers, 4 bit, float32 scales."""
    return Path(str(resources.files("outcore"))) / "demo_model"


@pytest.fixture(scope="session")
def quick_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's architecture, tokenizer and size in random float32 weights: prompts take a sixth of the time."""
    config = zoo.CONFIGS["qwen3_5"]
    text = config["text_config"] | {
        "num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192,
        "full_attention_interval": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3_5", config | {"text_config": text, "tie_word_embeddings": True})
        zoo.save_checkpoint("qwen3_5", folder)
    shutil.copy(demo_model / "tokenizer.json", folder)
    tokenizer = json.loads((demo_model / "tokenizer_config.json").read_text())
    # Random weights may end a text anywhere.
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
    return folder
