"""A few examples of each of the fuzz harness's targets, the same each time; ``benchmarks/fuzz.py`` tries many."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import strategies as st

import fuzz
import fuzz_targets
from fuzz_targets import FuzzTarget
from outcore import UsageError
from outcore.checkpoint.prompt_cache import open_prompt_cache
from outcore.machine.memory import peak_rss
from outcore_bench.document import DocumentError, read_inputs

EXAMPLES = {"tokenizer": 8, "memory": 100}
FEW = 20
NAMES = (
    "header", "index", "config", "manifest", "packed", "adapter", "tokenizer", "calibration", "batch", "answers",
    "prompt-cache", "report", "memory", "draft",
)  # fmt: skip


class Hangs(BaseException):
    """An example takes too long: no Exception, so that nothing takes it for an error of its own."""


@pytest.fixture
def in_time() -> Iterator[Any]:
    """What to call with each example; it has 5 seconds of this process's time."""

    def late(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        yield lambda _: signal.setitimer(signal.ITIMER_VIRTUAL, 5)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_our_own_errors_in_time_and_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: Any
) -> None:
    # Whatever targets() changes there is taken back.
    for variable in ("OUTCORE_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the variable is read once, at the start
    makers = fuzz_targets.targets(tmp_path)
    assert tuple(makers) == NAMES
    counts, held = fuzz.Counts(), peak_rss()
    fuzz.search(makers[name](), EXAMPLES.get(name, FEW), counts, in_time, None)
    assert counts.examples >= EXAMPLES.get(name, FEW) // 2
    # A whole file is as good as before it was touched; of what was touched, some is refused.
    assert counts.refused > 0 or name in ("calibration", "batch")
    assert peak_rss() - held < 1_000_000_000


def test_the_search_finds_what_is_wrong(in_time: Any) -> None:
    def wrong(n: int) -> None:
        if n > 100:
            raise ZeroDivisionError
        if n > 50:
            raise UsageError("fifty is enough")

    counts = fuzz.Counts()
    with pytest.raises(ZeroDivisionError):
        fuzz.search(FuzzTarget(st.integers(), wrong), 100, counts, in_time, None)
    assert counts.examples and counts.refused


def test_names_that_ask_for_a_list_without_end_are_refused(tmp_path: Path) -> None:
    """Found by the harness: MLX would fill up a list of two thousand million."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, save_prompt_cache

    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 3, 32)), mx.zeros((1, 2, 3, 32)))
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), [cache])
    arrays, metadata = mx.load(str(file), return_metadata=True)  # type: ignore[misc]
    open_prompt_cache(file, "x")
    mx.save_safetensors(str(file), {**arrays, "2147483647": mx.zeros((1,))}, metadata)  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="has the index 2147483647"):
        open_prompt_cache(file, "x")


def test_results_of_what_is_no_number_are_refused(tmp_path: Path) -> None:
    """Found by the harness."""
    results = Path(fuzz.__file__).parent / "results" / "llama-4gb-cpu.json"
    whole = json.loads(results.read_text(encoding="utf-8"))
    file = tmp_path / "result.json"
    rows = whole["rows"]
    file.write_text(json.dumps(whole | {"rows": [rows[0] | {"ttft_s": rows[0]["ttft_s"] | {"median": 10**400}}]}))
    with pytest.raises(DocumentError) as e:
        read_inputs([file])
    assert "\n" not in str(e.value)
