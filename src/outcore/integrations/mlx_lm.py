"""An alias of ``outcore_compat.mlx_lm``, which the first access to an attribute imports."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("outcore_compat.mlx_lm"), name)


if __name__ == "__main__":
    importlib.import_module("outcore_compat.mlx_lm").main()
