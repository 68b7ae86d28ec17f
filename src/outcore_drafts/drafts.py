"""The kinds of drafts of this package, in the order in which ``--draft auto`` considers them."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.decode.speculative.sources import DraftSource

from .draft_model import DraftModels
from .mtp.kind import MtpHeads
from .self_draft import SelfDrafts

SOURCES: Sequence[DraftSource] = (MtpHeads(), SelfDrafts(), DraftModels())
