"""mlx-vlm's modules of routed experts as mlx-lm's, so that experts are found and read one by one."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.models import switch_layers as mlx_lm_switches
from mlx_vlm.models import switch_layers as mlx_vlm_switches

from outcore.modules.layers import modules

_PAIRS = [
    (getattr(mlx_vlm_switches, name), getattr(mlx_lm_switches, name))
    for name in ("SwitchGLU", "SwitchMLP", "SwitchLinear", "QuantizedSwitchLinear")
]


def as_mlx_lm_switches(model: nn.Module) -> None:
    """Gives each module of routed experts a class that counts as mlx-lm's too."""
    for module in modules(model):
        for theirs, ours in _PAIRS:
            if isinstance(module, theirs) and not isinstance(module, ours):
                module.__class__ = _counted(cast(Any, type(module)), ours)


@cache
def _counted(kind: Any, ours: Any) -> type:
    return type(kind.__name__, (kind, ours), {"__module__": kind.__module__})
