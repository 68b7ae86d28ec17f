"""A pytest plugin that sets up what another project's tests need to find (``foreign_tests.py`` runs them with it)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SETTINGS: dict[str, Any] = json.loads(os.environ["FOREIGN"])

ASKED_FOR = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000}
"""Arguments that newer servers look at, with their defaults."""


def pytest_configure() -> None:
    if SETTINGS["suite"] == "mlx-flash":
        _stand_in_for_mlx_flash()
        return
    if importlib.util.find_spec("requests") is None:
        sys.modules["requests"] = _requests()
    import mlx_lm.utils

    mlx_lm.utils._download = lambda repo, **_: Path(SETTINGS["model"])
    if "memory" in SETTINGS:
        from outcore_compat.mlx_lm import apply_patch

        apply_patch(memory=SETTINGS["memory"], context=256, dtype=SETTINGS["dtype"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if hasattr(item, "module")}:
        provider = getattr(module, "DummyModelProvider", None)
        if provider is not None:
            _brought_up_to_date(provider)


def _brought_up_to_date(provider: Any) -> None:
    """What the installed server asks of it that it does not have."""
    made = provider.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.processor = getattr(self, "processor", None)
        for name, value in ASKED_FOR.items():
            if not hasattr(self.cli_args, name):
                setattr(self.cli_args, name, value)

    provider.__init__ = init
    if not hasattr(provider, "reset"):
        provider.reset = lambda self: None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if "memory" not in SETTINGS:
        return
    from outcore_compat import patched_calls
    from outcore_compat.mlx_lm import remove_patch

    remove_patch()
    ours = {id(new) for _, new in patched_calls.PAIRS}
    left = [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not name.startswith("outcore")
        for key, value in list(vars(module).items())
        if id(value) in ours
    ]
    terminalreporter.write_line(f"names that are not what they were: {left or 'none'}")
    for model in _models():
        metrics = model.outcore.metrics
        terminalreporter.write_line(f"{model.outcore!r}: {metrics.sweeps} sweeps, {metrics.bytes_read} bytes read")
    assert not left


def _models() -> Iterator[Any]:
    import gc

    import mlx.nn as nn

    yield from (m for m in gc.get_objects() if isinstance(m, nn.Module) and "outcore" in m.__dict__)


def _requests() -> ModuleType:
    """As much of ``requests`` as they use, over httpx."""
    import httpx

    def answer(found: httpx.Response) -> Any:
        def lines() -> Iterator[bytes]:
            yield from found.content.splitlines()

        return SimpleNamespace(text=found.text, status_code=found.status_code, iter_lines=lines)

    module: Any = ModuleType("requests")
    module.get = lambda url: answer(httpx.get(url, timeout=300))
    module.post = lambda url, json, stream=False: answer(httpx.post(url, json=json, timeout=300))
    return module


def _stand_in_for_mlx_flash() -> None:
    """Its package's names, ours behind them."""
    from outcore_compat import lmstudio

    class Ours(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(lmstudio, name)

    modelfile: Any = ModuleType("mlx_flash.integration.modelfile")
    modelfile.parse_flash_directives = _flash_of
    sys.modules["mlx_flash.integration.modelfile"] = modelfile
    for name in ("", ".config", ".manager", ".generation", ".integration", ".integration.lmstudio"):
        sys.modules["mlx_flash" + name] = Ours("mlx_flash" + name)


def _flash_of(text: str) -> Any:
    """Its instructions, as a configuration."""
    from outcore_compat.lmstudio import FlashConfig

    fields = {
        "flash": ("enabled", lambda word: word == "true"),
        "flash_ram_gb": ("ram_budget_gb", float),
        "flash_threads": ("n_io_threads", int),
        "flash_prefetch_layers": ("prefetch_layers", int),
        "flash_quant_warn_below": ("min_quant_bits", int),
        "flash_top_k": ("moe_top_k_override", int),
        "flash_eviction": ("eviction_strategy", str),
    }
    found: dict[str, Any] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name.lower() in fields:
            field, kind = fields[name.lower()]
            found[field] = kind(value.strip())  # type: ignore[operator]
    return FlashConfig.from_dict(found)
