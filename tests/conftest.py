from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import mlx.core as mx
import pytest


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
