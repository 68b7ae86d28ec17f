"""What the core asks of this package: ``outcore.checkpoint.codings.Codings``."""

from .compact_copy import about, or_compact
from .forms import as_used

__all__ = ["about", "as_used", "or_compact"]
