"""An alias of ``outcore_compat.lmstudio``, which the first access to an attribute imports."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("outcore_compat.lmstudio"), name)
