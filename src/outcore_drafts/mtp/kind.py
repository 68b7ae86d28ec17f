"""``--draft mtp``: a multi-token-prediction head drafts, the model's own or one read from the original checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from outcore.decode.opening import Opening
from outcore.decode.passes import HiddenKeeper
from outcore.decode.speculative.drafting import Drafting, TextState
from outcore.decode.speculative.proposers import Draw
from outcore.decode.speculative.sources import DraftSource
from outcore.engine.binding import Progress
from outcore.engine.model_profile import ModelProfile
from outcore.engine.session import Session
from outcore.errors import UsageError, called
from outcore.machine.allocator import clear_cache
from outcore.machine.device import on_cpu
from outcore.modules.split_linear import split_rows
from outcore.plan.joint_plan import Draft
from outcore.sizes import held_bytes

from ..draft_model import draft_folder
from .head import MtpHead, SharedParts, has_mtp, kv_bytes, open_mtp
from .hidden_states import WINDOW, HiddenStates
from .proposer import MTP, MtpProposer


class MtpHeads(DraftSource):
    kind, usage = MTP, "mtp, mtp:FOLDER"

    def parse(self, asked: str, argument: str | None) -> str | None:
        if argument == "":
            raise UsageError(
                f"{called('draft')} {asked}: give the original model's folder after the colon, or leave the colon out"
            )
        return argument

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, None, int]]:
        if has_mtp(profile.lazy):
            yield MTP, None, 0

    def open(self, which: str | None, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        o = opening.options
        asked = f"{called('draft')} {o.draft}"
        if o.head_resident is False and profile.size.head is not None:
            raise UsageError(
                f"{asked}: needs the model's head in memory; do not set head_resident=False, or draft ngram"
            )
        folder = None
        if which is not None:
            # A folder need not be a whole model: the one file with the head is enough.
            folder = Path(which) if Path(which).is_dir() else draft_folder(which)
        draft = draft_by_head(profile, folder)
        if draft is not None:
            return profile, draft
        if folder is not None:
            raise UsageError(
                f"{asked}: that folder has no multi-token-prediction head for this model; give the original model"
            )
        raise UsageError(
            f"{asked}: {profile.lazy.checkpoint.folder} has no multi-token-prediction head; conversions to MLX leave "
            f"them out. Give the original model's folder, or the one file of it that holds the head: {MTP}:FOLDER; or "
            "draft with ngram or self"
        )

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        return ByHead(load_head(draft.detail, profile))


def draft_by_head(profile: ModelProfile, folder: Path | None) -> Draft | None:
    """Describes the draft by the head in ``folder`` (None: the model's own folder); None if there is no head. Raises as
    ``open_mtp``."""
    head = open_mtp(profile.lazy, folder, profile.cast.target)
    if head is None:
        return None
    weight = head.norm.weight
    each = kv_bytes(head, weight.size, weight.dtype)
    return Draft(
        MTP,
        MTP,
        weights=sum(a.nbytes for _, a in tree_flatten(head.parameters())),
        cache=WINDOW * weight.nbytes + held_bytes([(each, None)], profile.size.context),
        growing=((each, None),),
        uses_head=True,
        detail=folder,
    )


class ByHead(Drafting):
    """A head in memory. It is loaded before the model, because quantizing it takes additional memory."""

    kind = MTP
    holds_head = True

    def __init__(self, head: MtpHead) -> None:
        super().__init__(MTP)
        self.model = head
        self.shared: SharedParts | None = None

    def join(self, session: Session) -> Drafting:
        if session.plan.head_streamed:
            session.note("the model's head is not in memory, so nothing drafts with it but the text's own repetitions")
            return Drafting()
        self.shared = SharedParts(session.model)
        if on_cpu():
            split_rows(self.model, session.cpu_streams)
        return self

    def hidden(self) -> HiddenKeeper | None:
        return None if self.shared is None else HiddenStates(self.shared.tap)

    def proposer(self, draw: Draw, state: TextState, hidden: HiddenKeeper | None) -> MtpProposer | None:
        if self.shared is None:
            return None
        assert isinstance(hidden, HiddenStates)
        return MtpProposer(self.model, self.shared, draw, hidden)

    def close(self) -> None:
        self.model = self.shared = None


def load_head(folder: Path | None, profile: ModelProfile) -> MtpHead:
    """Loads the head array by array, so that quantizing takes additional memory for one array only."""
    head = open_mtp(profile.lazy, folder, profile.cast.target)
    assert head is not None
    for _, array in tree_flatten(head.parameters()):
        mx.eval(array)
    clear_cache()
    return head
