"""Another name of ``outcore_compat.lmstudio``, which is imported when something of it is asked for."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("outcore_compat.lmstudio"), name)
