"""For those who come from mlx-flash: each of its settings means something here, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import outcore
from outcore import UsageError
from outcore_compat.lmstudio import DEFAULTS, MEANT, FlashConfig, apply_flash_patch, remove_flash_patch
from outcore_compat.mlx_lm import remove_patch

PROMPT = "def f(x):\n"
DOCS = Path(__file__).parents[1] / "docs" / "integrations.md"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    original = mlx_lm.load
    yield
    remove_flash_patch()
    remove_patch()
    assert mlx_lm.load is original


def ours(**fields: Any) -> Any:
    return FlashConfig(**fields).options()


def test_a_field_means_what_it_is_closest_to() -> None:
    plain = ours()
    assert (plain.memory, plain.slots, plain.threads, plain.io) == (2_000_000_000, None, None, "auto")
    assert plain.prefill_step_size is None
    assert ours(ram_budget_gb=0.5).memory == 500_000_000
    assert [ours(pipeline_depth=n).slots for n in (1, 3, 5)] == [2, 3, 5]
    assert [ours(prefetch_layers=n).slots for n in (0, 1, 3)] == [2, 2, 4]
    assert ours(pipeline_depth=3, prefetch_layers=4).slots == 5
    assert ours(n_io_threads=7).threads == 7
    assert [ours(eviction_strategy=s).io for s in ("free", "dontneed", "none")] == ["auto", "auto", "cached"]
    assert [ours(prefill_chunk_size=n).prefill_step_size for n in (0, 512)] == [None, 512]
    assert [ours(disk_kv_enabled=on).kv_disk for on in (True, False)] == ["on", "auto"]
    assert ours(disk_kv_dir="a").kv_dir == "a" and ours(kv_cache_dir="b").kv_dir == "b"
    assert FlashConfig(max_kv_size=512).generation() == {"max_kv_size": 512}
    assert FlashConfig(kv_bits=4).generation() == {"kv_bits": 4, "quantized_kv_start": 0}
    assert FlashConfig(kv_cache_quantized=True).generation()["kv_bits"] == 8
    assert FlashConfig(kv_cache_bits=4).generation() == {}, "as there: bits of what is not quantized"


OTHER: dict[str, Any] = {
    "moe_top_k_override": 1, "expert_cache_size": 16, "tiled_execution": True, "tile_size": 512,
    "metal_kernels": False, "strict_guardrails": False, "kv_cache_local_window_size": 64,
    "max_in_memory_kv_tokens": 512, "enable_prefill_guardrail": False, "max_safe_prefill_tokens": 32,
    "max_safe_context_tokens": 256, "disk_kv_max_tokens": 4096, "min_quant_bits": 8, "strict_quant": True,
    "debug": True, "enable_profiling": True, "monitor_queue": 1, "kv_keep": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(DEFAULTS) - MEANT))
def test_what_means_nothing_here_is_refused_when_it_is_used(name: str) -> None:
    config = FlashConfig(enabled=True, **{name: OTHER[name]})
    assert getattr(config, name) == OTHER[name]
    with pytest.raises(UsageError, match=f"^{name}="):
        apply_flash_patch(config)


def test_every_field_is_reported() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in sorted(DEFAULTS) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("ram_budget_gb", 0.05), ("ram_budget_gb", float("nan")), ("n_io_threads", 0), ("n_io_threads", 64),
     ("eviction_strategy", "lru"), ("prefill_chunk_size", -1), ("prefetch_layers", "two"),
     ("max_kv_size", 0)],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        FlashConfig(**{field: value})
    config = FlashConfig()
    setattr(config, field, value)
    with pytest.raises(UsageError, match=field):
        config.options()


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="max_kv_size and kv_bits"):
        FlashConfig(max_kv_size=512, kv_bits=4).generation()


def test_a_configuration_is_read_from_a_dictionary() -> None:
    whole = dataclasses.asdict(FlashConfig(enabled=True, ram_budget_gb=8))
    assert FlashConfig.from_dict(whole) == FlashConfig(enabled=True, ram_budget_gb=8)
    assert FlashConfig.from_dict(whole).options().memory == 8_000_000_000
    with pytest.warns(UserWarning, match="no such fields, ignored: unknown_key"):
        assert FlashConfig.from_dict({"enabled": True, "unknown_key": 999}).enabled


def test_the_patch_streams_where_it_is_enabled(short_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = mlx_lm.load
    expected = mlx_lm.generate(*mlx_lm.load(str(short_model)), PROMPT, max_tokens=4)
    apply_flash_patch()
    apply_flash_patch(FlashConfig(enabled=False))
    assert mlx_lm.load is original
    smallest = outcore.plan_model(str(short_model), prefill_step_size=16).smallest_budget_bytes
    # In units of 0.1 GB at least, more than this model takes as a whole.
    apply_flash_patch(FlashConfig(enabled=True, pipeline_depth=3))
    config = FlashConfig(enabled=True, prefill_chunk_size=16)
    config.ram_budget_gb = 0.1
    with caplog.at_level(logging.INFO, logger="outcore"):
        apply_flash_patch(config)
        model, tokenizer = mlx_lm.load(str(short_model))
    assert "not for weights alone" in caplog.text
    with model.outcore as session:
        assert session.plan.budget_bytes == 100_000_000 > smallest and session.plan.prefill_step <= 16
        assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=4) == expected
    remove_flash_patch()
    assert mlx_lm.load is original


# LM Studio's engine


@pytest.fixture
def mlx_vlm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module like mlx-vlm's, and a part of LM Studio's engine that has imported its function."""
    package, utils = types.ModuleType("mlx_vlm"), types.ModuleType("mlx_vlm.utils")
    exec("def load_model(model_path, lazy=False, **kwargs):\n    return 'vision'", vars(utils))
    package.__path__ = []
    package.__spec__ = types.SimpleNamespace(submodule_search_locations=[])  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "mlx_vlm", package)
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", utils)
    engine: Any = types.ModuleType("mlx_engine_generate")
    exec("from mlx_vlm.utils import load_model as mlx_vlm_load_model", vars(engine))
    monkeypatch.setitem(sys.modules, "mlx_engine_generate", engine)
    return engine


def test_texts_models_are_streamed_by_mlx_vlms_function_too(
    mlx_vlm: Any, short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mlx_vlm.mlx_vlm_load_model
    options = dataclasses.replace(FlashConfig().options(), memory=None, resident=1, context=64)
    monkeypatch.setattr(FlashConfig, "options", lambda _: options)
    apply_flash_patch(FlashConfig(enabled=True))
    load = mlx_vlm.mlx_vlm_load_model
    assert load is not original and load is sys.modules["mlx_vlm.utils"].load_model
    probe = load(short_model, lazy=True)
    assert not any(hasattr(c, "merge") for c in probe.make_cache())
    model = load(short_model, lazy=False, trust_remote_code=False)
    with model.outcore as session:
        assert session.streaming is not None and model(mx.array([[5, 6]])).shape[:2] == (1, 2)
    for field in ("vision_config", "audio_config"):
        folder = tmp_path / field
        shutil.copytree(short_model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {field: {"depth": 2}}))
        for lazy in (True, False):
            with pytest.raises(UsageError, match=rf"{field}: a model that takes images or sound"):
                load(folder, lazy=lazy)
    remove_flash_patch()
    assert mlx_vlm.mlx_vlm_load_model is original is sys.modules["mlx_vlm.utils"].load_model
    assert load(short_model) == "vision", "whoever kept it has mlx-vlm's again"
