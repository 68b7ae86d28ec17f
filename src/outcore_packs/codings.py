"""What the core asks of this package: ``outcore.checkpoint.codings.Codings``."""

from __future__ import annotations

from .forms import as_used

__all__ = ["as_used"]
