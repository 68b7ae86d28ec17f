"""The compact copy of a model, in its place where that is predicted to be faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.manifest import COMPACT, PLANES
from outcore.checkpoint.packed_store import open_copy
from outcore.engine.model_profile import ModelProfile
from outcore.errors import BudgetError
from outcore.machine.device import on_cpu
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.planner import ASSUMED, make_plan
from outcore.sizes import format_size

PAYS = 0.97
"""Of the predicted time with the original, what a copy takes at most: predictions are not better than that."""


def or_compact(
    folder: Path,
    profile: ModelProfile,
    known: Calibration | None,
    measure: Callable[[LazyModel], ModelProfile],
    budget: int,
    fixed: Mapping[str, Any],
) -> ModelProfile:
    """The model, or its compact copy in the cache where there is one and plans for it are faster.

    Args:
        folder: of the model: the original's, where ``profile`` may be of its plain copy.
        known: the machine's calibration; without one no processor is taken to decode fast enough.
        measure: makes a profile of what was opened.
        fixed: what ``make_plan`` takes beside.
    """
    if on_cpu() and (known is None or known.decode_gbps is None):
        return profile
    lazy = open_copy(folder, COMPACT, **profile.lazy.arguments)
    if lazy is None:
        return profile
    compact = measure(lazy)
    if not lazy.decoders:  # no tensor of it got smaller, so it is an aligned copy like any other
        return compact
    seconds = [_seconds(p.size, budget, known or ASSUMED, fixed) for p in (profile, compact)]
    return compact if seconds[1] < PAYS * seconds[0] else profile


def _seconds(size: ModelSize, budget: int, calibration: Calibration, fixed: Mapping[str, Any]) -> float:
    try:
        return make_plan(size, budget, calibration=calibration, **fixed).run_s
    except BudgetError:
        return float("inf")


def about(profile: ModelProfile, plan: Plan) -> tuple[str, ...]:
    """That weights are decoded on their way, where they are."""
    layers = [profile.size.layers[i] for i in plan.streamed]
    if not any(layer.decoded for layer in layers):
        return ()
    if (coding := profile.lazy.coding).startswith(PLANES):
        bits = coding.removeprefix(f"{PLANES}:")
        said = f"this copy's codes are cut to draft with self:{bits} (outcore pack --coding {coding})"
        return (f"{said}; without that draft they are put together in each sweep, where the original's are as used",)
    read, used = sum(x.read for x in layers), sum(x.resident for x in layers)
    said = f"a compact copy is read: {format_size(read)} of the {format_size(used)} that streamed layers are"
    slow = "; decoding takes a processor longer than reading saves, as a rule (outcore pack --coding plain)"
    return (said + slow if on_cpu() else said,)
