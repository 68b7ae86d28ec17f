"""What Python programs rely on of ``import outcore``: names, parameters, defaults, errors, and what a loaded model
tells (golden/python.json)."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import json_shapes as shapes
import pytest

import outcore

FUNCTIONS = ["batch_generate", "generate", "load", "load_model", "plan_model", "stream_generate"]

SESSION = ["plan", "metrics", "notes", "in_cache", "close", "__enter__", "__exit__"]
METRICS = ["sweeps", "tokens", "bytes_read", "read_gbps", "stall_s", "drafted", "accepted", "prompt_found", "reset"]
PLAN = [
    "budget_bytes", "peak_bytes", "smallest_budget_bytes", "resident", "streamed", "streams", "slots", "slot_bytes",
    "context", "prefill_step", "bytes_per_token",
]  # fmt: skip
RESPONSE = [
    "text", "token", "logprobs", "from_draft", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps",
    "peak_memory", "finish_reason",
]  # fmt: skip


def parameters(function: Any) -> list[list[str]]:
    """Of each its name, its kind, and its default if it has one."""
    found = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    return [[p.name, p.kind.name, *([] if p.default is empty else [repr(p.default)])] for p in found]


def test_names_parameters_and_errors_are_these() -> None:
    errors = {n: c for n in outcore.__all__ if inspect.isclass(c := getattr(outcore, n)) and issubclass(c, Exception)}
    found = {
        "all": sorted(outcore.__all__),
        "functions": {name: parameters(getattr(outcore, name)) for name in FUNCTIONS},
        "LoadOptions": {f.name: repr(f.default) for f in dataclasses.fields(outcore.LoadOptions)},
        "errors": {n: [base.__name__ for base in c.__mro__[1:-2]] for n, c in sorted(errors.items())},
        "dir": sorted(dir(outcore)),
    }
    shapes.same("python", found)


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, outcore; print([m for m in ('mlx', 'mlx_lm', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_options_are_checked_by_their_names_before_anything_is_opened() -> None:
    for name, wrong in {"resident": -1, "slots": 1, "io": "fast", "memory": "lots", "dtype": "int8"}.items():
        with pytest.raises(outcore.UsageError, match=name):
            outcore.load("nowhere", **{name: wrong})
        with pytest.raises(ValueError, match=name):
            outcore.LoadOptions(**{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resdent"):
        outcore.load("nowhere", resdent=1)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcore.LoadOptions().memory = 1  # type: ignore[misc]


def test_a_loaded_model_tells_its_plan_and_what_it_does(models: Any, load: Any) -> None:
    folder = models.folder("qwen3")
    plan = outcore.plan_model(folder, resident=1, memory="1GB", context=64, draft="none")
    assert isinstance(plan, outcore.Plan)
    model, config = outcore.load_model(folder, resident=1, memory="1GB", context=64, draft="none")
    session = model.outcore
    assert isinstance(session, outcore.Session) and config["model_type"] == "qwen3"
    assert [n for n in SESSION if not hasattr(session, n)] == []
    assert [n for n in METRICS if not hasattr(session.metrics, n)] == []
    assert [n for n in PLAN if not hasattr(session.plan, n)] == []
    assert session.plan == plan and plan.resident and plan.streamed and plan.streams
    with session:
        (response,) = outcore.stream_generate(model, models.no_text, [3, 4, 5], max_tokens=1)
        assert [n for n in RESPONSE if not hasattr(response, n)] == []
        assert (response.token, response.finish_reason, response.prompt_tokens) == (response.token, "length", 3)
        assert session.metrics.tokens == 1 and session.metrics.bytes_read > 0
        session.metrics.reset()
        assert session.metrics.tokens == 0
    with pytest.raises(outcore.ClosedError):
        list(outcore.stream_generate(model, models.no_text, [3], max_tokens=1))
