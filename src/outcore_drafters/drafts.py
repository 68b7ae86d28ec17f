"""The kind of drafts of this package."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.decode.speculative.sources import DraftSource

from .source import Drafters

SOURCES: Sequence[DraftSource] = (Drafters(),)
