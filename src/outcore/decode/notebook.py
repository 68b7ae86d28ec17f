"""Progress in notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def progress() -> Callable[[str, int, int], None]:
    """Returns a function that shows a bar in a notebook, a widget where ipywidgets is installed; elsewhere nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return lambda what, done, total: None
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # mlx-lm's own dependencies bring it

    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        for other in [name for name in bars if name != what]:
            bars.pop(other).close()
        if what not in bars:
            bars[what] = tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False)
        bars[what].update(done - bars[what].n)
        if done >= total:
            bars.pop(what).close()

    return show
