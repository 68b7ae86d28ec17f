"""What the core asks of this package: ``outcore.checkpoint.codings.Codings``."""

from __future__ import annotations

from outcore.checkpoint.manifest import PLANES
from outcore.engine.model_profile import ModelProfile
from outcore.machine.device import on_cpu
from outcore.plan.plan import Plan
from outcore.sizes import format_size

from .forms import as_used

__all__ = ["about", "as_used"]


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
