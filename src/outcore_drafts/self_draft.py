"""``--draft self:BITS``: drafts by a low-bit copy of the model, or by the high bits of the model's own codes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.manifest import MANIFEST
from outcore.checkpoint.packed_store import missing_bytes, open_packed, source_of, whole_files
from outcore.decode.opening import Opening
from outcore.decode.passes import HiddenKeeper
from outcore.decode.speculative.drafting import Drafting, TextState
from outcore.decode.speculative.proposers import Draw, Guess
from outcore.decode.speculative.sources import DraftSource
from outcore.engine.binding import Progress
from outcore.engine.model_profile import ModelProfile
from outcore.engine.session import Session
from outcore.errors import StoreSpaceError, UsageError, called
from outcore.plan.joint_plan import AUTO, Draft
from outcore.plan.plan import Plan
from outcore.text import shortened
from outcore_packs.stored_planes import BITS

from .low_bit_copy import LowBitCopy, load_copy, low_bit_copy, write_copy
from .nested_layers import Stamp, file_stamps, high_bits_streamed, nested, nested_modules, share_high_bits

SELF = "self"

DEFAULT_BITS = 3

# Bits that ``--draft auto`` considers.
WEIGHED = (2, 3, 4)

# Acceptance rate assumed before any guess, by a copy's bits: measured on code and prose with a model of 28M parameters
# at 4 and 8 bits (dev/log/drafts.md). More bits: as 4.
CHANCES = {2: 0.75, 3: 0.88, 4: 0.94}


class SelfDrafts(DraftSource):
    kind, usage = SELF, "self, self:BITS"

    def parse(self, asked: str, argument: str | None) -> int:
        bits = argument or str(DEFAULT_BITS)
        if bits not in map(str, BITS):
            raise UsageError(
                f"{called('draft')} {shortened(asked)}: give the number of bits, one of {', '.join(map(str, BITS))}"
            )
        return int(bits)

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, int, int]]:
        quantization = profile.lazy.config.get("quantization")
        own = quantization.get("bits") if isinstance(quantization, dict) else None
        weights = sum(layer.resident for layer in profile.size.layers)
        for bits in WEIGHED:
            if not isinstance(own, int) or bits < own:
                whole = own if isinstance(own, int) else 16
                # Scales stay as they are, and so do matrices that have fewer bits already: hence the 2 more.
                yield f"{SELF}:{bits}", bits, weights * bits // (max(whole, bits) + 2)

    def open(self, which: int, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        o, plain = opening.options, profile.lazy
        if o.ranks is None:  # ranks share the layers of the named folder
            profile = nested(profile, which, opening)
        if profile.size.kv_disk != "off":
            if o.kv_disk == "on":
                raise UsageError(
                    f"{called('kv_disk')} on and {called('draft')} {o.draft} do not go together: a copy of the model "
                    f"reads all keys and values for every token that it drafts; use {called('draft')} ngram"
                )
            profile = replace(profile, size=replace(profile.size, kv_disk="off"))
        copied, size = low_bit_copy(profile, which, plain), profile.size
        weights = copied.nbytes(False)
        return profile, Draft(
            SELF,
            f"{SELF}:{which}",
            weights=weights,
            head=copied.nbytes(True) - weights,
            cache=size.cache,
            growing=size.growing,
            copies_model=True,
            chance=CHANCES[min(which, 4)],
            detail=copied,
        )

    def to_write(self, profile: ModelProfile, plan: Plan, draft: Draft) -> tuple[int, Path]:
        copied: LowBitCopy = draft.detail
        low = missing_bytes(profile.lazy, profile.layers) if plan.streams else 0
        whole = whole_files(copied.folder, MANIFEST, copied.files, source_of(profile.lazy.checkpoint))
        return low + sum(f.nbytes for f in copied.files if f.name not in whole), copied.folder

    def write(self, profile: ModelProfile, draft: Draft, progress: Progress) -> None:
        write_copy(profile, draft.detail, progress)

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        return ByCopy(draft, opening.options.draft == AUTO, progress)


class ByCopy(Drafting):
    """Drafts by a copy of the model. ``join``, which follows the model's load, writes the copy if needed and loads it.
    ``auto``: ``--draft auto`` chose it."""

    kind, holds_head = SELF, True

    def __init__(self, draft: Draft, auto: bool, progress: Progress) -> None:
        super().__init__(draft.name)
        self._copied, self._auto, self._progress = draft.detail, auto, progress
        self._high_bits: Mapping[str, TensorInfo] = {}  # where the high bits of nested layers are on disk
        self._stamps: Mapping[Path, Stamp | None] = {}

    def join(self, session: Session) -> Drafting:
        profile, copied = session.profile, self._copied
        try:
            write_copy(profile, copied, self._progress)
        except StoreSpaceError as error:
            if not self._auto or session.transport.alone:
                raise
            # Other ranks have planned already, so all go on, but without the draft.
            session.note(f"nothing drafts but the text's own repetitions: {error}")
            return Drafting()
        model = self.model = load_copy(profile, copied, session.plan.head_streamed, session.cpu_streams)
        session.transport.fill(model)
        share_high_bits(profile.lazy.model, model)
        # Only of nested layers: the copy has other tensors under the same names, too.
        shared = {path for path, _ in nested_modules(profile.lazy.model)}
        if shared:
            tensors = {**open_packed(copied.folder).tensors, **copied.elsewhere}
            self._high_bits = {path: t for path, t in tensors.items() if path.rpartition(".")[0] in shared}
        self._stamps = file_stamps(self._high_bits)
        return self

    def proposer(self, draw: Draw, state: TextState, hidden: HiddenKeeper | None) -> CopyProposer | None:
        return None if self.model is None else CopyProposer(self.model, draw, state)

    @property
    def intact(self) -> bool:
        """Whether the files with the high bits are unchanged since the copy was loaded."""
        return None not in self._stamps.values() and file_stamps(self._high_bits) == self._stamps

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        """As in ``Drafter``: the layers that shared the copy's high bits then read these, too."""
        return high_bits_streamed(profile, self._high_bits) if self._high_bits else profile

    def give_up(self, session: Session) -> Drafting:
        session.transport.fill(None)
        return super().give_up(session)


class CopyProposer:
    """Proposes tokens by a low-bit copy of the model that continues from the model's own caches.

    So the copy computes no prompt, and each draft starts from the model's exact state.

    Args:
        model: the copy, all in memory.
        draw, state: as in ``Drafting.proposer``.
    """

    name = SELF
    cheaper = None

    def __init__(self, model: nn.Module, draw: Draw, state: TextState) -> None:
        self._model: nn.Module | None = model
        self._draw, self._state = draw, state
        self._cache: list[Any] | None = None
        self._last: list[int] = []  # the text's last token
        self._new: list[int] = []  # tokens of the text that the model's caches did not hold
        self._fed = 0  # how many tokens of ``_new`` and the draft were fed

    def give_up(self) -> None:
        self._model = self._cache = None

    def begin(self, text: Sequence[int]) -> None:
        self._cache, self._last = None, list(text[-1:])

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        if self._model is None:
            return None
        if self._cache is None:
            cache, pending = self._state()
            self._new = pending + self._last
            # The copied caches refer to the same arrays; MLX copies an array when it is written to.
            self._cache, self._fed = copy.deepcopy(cache), 0
        new = [*self._new, *drafted][self._fed :]
        self._fed += len(new)
        with mx.stream(generation_stream):
            logits = self._model(mx.array(new, dtype=mx.int32)[None], cache=self._cache)
            return self._draw(logits[0, -1])
