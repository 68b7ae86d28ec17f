"""``--draft mtp``: a multi-token-prediction head drafts, the model's own or one read from the original checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

from outcore.decode.opening import Opening
from outcore.decode.passes import HiddenKeeper
from outcore.decode.speculative.drafting import Drafting, TextState
from outcore.decode.speculative.proposers import Draw, Guess
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
from .layouts import Cache, leaves

MTP = "mtp"

# Tokens that the head computes at a time. Few, since the plan reserves no activations for the head; they fit into
# those of a chunk of the model.
STEP = 16


class MtpProposer:
    """Calls the head again and again: from the second guess on, its own state replaces the model's hidden state.

    The head's cache has the text's tokens from the first available hidden state on. Guessed tokens are trimmed from it
    when the text goes on.

    Args:
        head, shared: the head and the model's parts that it uses, in memory.
        draw: as in ``Drafting.proposer``.
        hidden: hidden states of the text's tokens, except the last.
    """

    name = MTP
    cheaper = None

    def __init__(self, head: MtpHead, shared: SharedParts, draw: Draw, hidden: HiddenStates) -> None:
        self._head: MtpHead | None = head
        self._shared, self._draw, self._hidden = shared, draw, hidden
        self._text: list[int] = []
        self._cache: Cache | None = None  # None until the head has followed some tokens
        self._followed = 0  # how many tokens' hidden states went into the head
        self._state: mx.array | None = None  # (1, 1, hidden): the head's state of the text's last token
        self._chain: list[mx.array] = []  # the head's states of the tokens guessed after the text

    def give_up(self) -> None:
        self._head = self._state = None
        self._chain, self._cache = [], None

    def begin(self, text: Sequence[int]) -> None:
        self._text = list(text)
        if self._cache is not None:
            self._cache.trim(len(self._chain))
        self._chain = []
        with mx.stream(generation_stream):
            self._follow()

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        if self._state is None:
            return None
        with mx.stream(generation_stream):
            for token in drafted[len(self._chain) :]:
                self._chain.append(self._compute([token], self._chain[-1] if self._chain else self._state))
            logits = self._shared.logits(self._chain[-1] if self._chain else self._state)
            return self._draw(logits[0, -1])

    def _follow(self) -> None:
        """Feeds the text's new tokens to the head, each with the hidden state of the one before it."""
        if self._head is None or self._hidden.end == self._followed:
            return
        taken = self._hidden.take(self._followed)
        if taken is None:
            self._state = None
            return
        at, states = taken
        if at > self._followed or self._state is None or self._cache is None:
            # Some states are missing: begin a new cache from here.
            self._cache = self._head.make_cache()
        ids = self._text[len(self._text) - states.shape[1] :]
        for first in range(0, len(ids), STEP):
            out = self._compute(ids[first : first + STEP], states[:, first : first + STEP])
            mx.eval(out, [leaf.state for leaf in leaves(self._cache)])
            self._state = out[:, -1:]
        self._followed = at + len(ids)

    def _compute(self, ids: Sequence[int], states: mx.array) -> mx.array:
        assert self._head is not None
        embedded = self._shared.embedded(mx.array(list(ids), dtype=mx.int32))
        return self._head(embedded, states, self._cache)


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
