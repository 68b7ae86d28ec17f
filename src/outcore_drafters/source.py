"""``--draft FOLDER``: a published drafter guesses, from the states of the model's layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outcore.checkpoint.find_model import name_of
from outcore.decode.opening import Opening
from outcore.decode.passes import HiddenKeeper
from outcore.decode.speculative.acceptance import WEIGHT, AcceptanceStats, Rate
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting, TextState
from outcore.decode.speculative.proposers import Draw, Proposer
from outcore.decode.speculative.sources import DraftSource
from outcore.engine.binding import Progress
from outcore.engine.model_profile import ModelProfile
from outcore.engine.session import Session
from outcore.errors import CheckpointError, OutcoreError, UnsupportedModelError, UsageError, called
from outcore.machine.allocator import clear_cache
from outcore.machine.device import on_cpu
from outcore.modules.split_linear import split_rows
from outcore.plan.joint_plan import MOST, Draft
from outcore.sizes import held_bytes
from outcore.text import one_line, shortened
from outcore_drafts.draft_model import draft_folder
from outcore_drafts.mtp.head import text_model, trunk
from outcore_drafts.mtp.hidden_states import WINDOW, HiddenStates
from outcore_drafts.mtp.layouts import tensors_in

from .config import ComputeDtype, check_target, config_of, is_drafter, kind_of, open_drafter, sketched
from .drafter import BlockDrafter, DraftedModel
from .given_up import GivenUp
from .proposer import DRAFTER, STEP, BlockProposer
from .published import PUBLISHED, keep, seen_chance, seen_file, trained
from .tap import LayerTaps
from .train.work_folder import SETTINGS, WORK

UNREADABLE = (
    "nothing drafts but the text's own repetitions: drafters cannot read the states of this type of model, which have "
    "several parts or pass a layer more than once"
)

DRAFT_BITS = (2, 3, 4, 6, 8)


class Drafters(DraftSource):
    kind, usage, quantizes = DRAFTER, "drafter:FOLDER", True

    def takes(self, asked: str) -> bool:
        try:
            return _unfinished(asked) or is_drafter(config_of(draft_folder(asked)))
        except OutcoreError:
            return False  # the source of draft models says what is wrong

    def parse(self, asked: str, argument: str | None) -> str:
        if argument is None:
            return asked if Path(asked).is_dir() else ""  # the folder is called like the kind, or it is the model's own
        if not argument:
            raise UsageError(f"{called('draft')} {shortened(asked)}: give the drafter's folder, as {self.usage}")
        return argument

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, str, int]]:
        """The drafter in the folder ``drafter`` of the model's folder."""
        folder = profile.lazy.checkpoint.folder / DRAFTER
        if folder.is_dir() and self.takes(str(folder)):
            yield DRAFTER, str(folder), 0

    def open(self, which: str, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        if not which and not Path(which := str(profile.lazy.checkpoint.folder / DRAFTER)).is_dir():
            raise UsageError(
                f"{called('draft')} {DRAFTER}: the model has none; give the drafter's folder, as {self.usage}"
            )
        if _unfinished(which):
            raise UsageError(f"{called('draft')} {shortened(which)}: not trained to its end; run draft train again")
        o, folder = opening.options, draft_folder(which)
        if o.draft_bits not in (None, *DRAFT_BITS):
            raise UsageError(f"{called('draft_bits')} {o.draft_bits}: give 2, 3, 4, 6 or 8")
        network = opened(folder, profile, opening, planned=True)
        if o.head_resident is False and network.borrows_head and profile.size.head is not None:
            raise UsageError(
                f"{called('draft')} {shortened(o.draft)}: needs the model's head in memory; do not set "
                "head_resident=False, or draft ngram"
            )
        arrays = [a for _, a in tree_flatten(network.parameters())]
        item = max(a.dtype.size for a in arrays if mx.issubdtype(a.dtype, mx.floating))
        growing = tuple((each * item // 2, most) for each, most in network.growing)
        size, layers = profile.size, trunk(text_model(profile.lazy.model)).layers
        numbers = {id(layer.module): n for n, layer in enumerate(profile.layers)}
        # Those of a window; and twice, while they are joined, those of a pass with drafts and of a step of the drafter.
        tokens = min(WINDOW, size.context) + 2 * (MOST + STEP)
        states = tokens * len(network.taps) * state_bytes(profile)
        seen = seen_file(profile.lazy.checkpoint, folder, o.draft_bits)
        draft = Draft(
            DRAFTER,
            name_of(folder),
            weights=sum(a.nbytes for a in arrays),
            cache=held_bytes(growing, size.context),
            growing=growing,
            uses_head=network.borrows_head,
            block=network.rows,
            reads=tuple(numbers.get(id(layers[n]), -1) for n in network.taps),
        )
        quantized = any(path.endswith(".scales") for path in profile.lazy.loaded)
        own = trained(config_of(folder))
        usual = own or PUBLISHED[bool(network.rows), quantized]
        if (counted := seen_chance(seen)) is None:
            published = usual.least, usual.most, usual.guesses
            draft = replace(draft, chance=usual.chance, assumed=usual.about, published=published)
        else:
            draft = replace(draft, chance=counted, assumed=f"measured: {counted:.0%} of its guesses were right here")
        draft = replace(draft, detail=(folder, states, seen, None if own is None else draft.chance))
        return replace(profile, size=replace(size, rest=size.rest + states)), draft

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        folder = draft.detail[0]

        def read() -> BlockDrafter:
            network = opened(folder, profile, opening)
            # Array by array, so that quantizing takes additional memory for one array only.
            try:
                for _, array in tree_flatten(network.parameters()):
                    mx.eval(array)
            except RuntimeError as e:  # raised by MLX: a file became shorter
                raise CheckpointError(f"{folder}: cannot be read: {one_line(e)}; download the drafter again") from e
            clear_cache()
            return network

        return ByDrafter(draft, read, trunk(text_model(profile.lazy.model)).layers)


def _unfinished(asked: str) -> bool:
    """Whether ``draft train`` has begun a drafter in this folder, and was stopped."""
    try:
        return Path(asked, WORK, SETTINGS).is_file() and not Path(asked, "config.json").exists()
    except OSError:  # the name is too long, or the folder may not be read
        return False


def opened(folder: Path, profile: ModelProfile, opening: Opening, *, planned: bool = False) -> BlockDrafter:
    """Returns the drafter, lazy. Raises ``UsageError`` if it was made for another model, and as ``open_drafter``.
    ``planned``: only its sizes are needed, for which a folder's config is enough."""
    config, model = config_of(folder), target_of(profile)
    kind = kind_of(folder, config)
    check_target(folder, kind, config, model, opening.folder)
    open_it = sketched if planned and not any(folder.glob("*.safetensors")) else open_drafter
    return open_it(folder, config, kind, model, opening.options.draft_bits, computed(profile))


def target_of(profile: ModelProfile) -> DraftedModel:
    """Returns what a drafter has to fit. Raises ``UnsupportedModelError`` if the model is not built as most are."""
    lazy = profile.lazy
    try:
        text = text_model(lazy.model)
        inner = trunk(text)
        if "embed_tokens" not in inner or "norm" not in inner:
            raise AttributeError("no embed_tokens or no norm beside the layers")
        said = text.args if hasattr(text, "args") else text.config
        return DraftedModel(said.hidden_size, said.vocab_size, len(inner.layers), lazy.config.get("model_type"))
    except AttributeError as e:
        raise UnsupportedModelError(
            f"{lazy.checkpoint.folder}: published drafters cannot draft for models of type "
            f"{lazy.config.get('model_type')}, which are not built as most are ({one_line(e)}); draft ngram"
        ) from e


def computed(profile: ModelProfile) -> ComputeDtype:
    """Returns the dtype that a drafter's arrays are cast to: float32 for a model that computes in it, since MLX's CPU
    kernels take 9 times as long for quantized weights in bfloat16."""

    def target(path: str, dtype: mx.Dtype) -> mx.Dtype | None:
        return profile.cast.target(path, dtype) or (mx.float32 if state_dtype(profile) == mx.float32 else None)

    return target


def state_dtype(profile: ModelProfile) -> mx.Dtype:
    """Returns the dtype of the states that a drafter reads."""
    own = trunk(text_model(profile.lazy.model)).norm.weight.dtype
    return profile.cast.target("model.norm.weight", own) or own


def state_bytes(profile: ModelProfile) -> int:
    """Returns bytes of one token's state of one layer."""
    return int(trunk(text_model(profile.lazy.model)).norm.weight.size * state_dtype(profile).size)


class SharedParts:
    """The parts of a loaded model that a drafter uses. Not a module, so that no weights are counted twice."""

    def __init__(self, model: nn.Module) -> None:
        self._text = text_model(model)
        inner = trunk(self._text)
        self._table, self._dtype = inner.embed_tokens, inner.norm.weight.dtype

    def embedded(self, ids: mx.array) -> mx.array:
        """Returns embeddings (1, tokens, hidden) of ids (tokens,). Rows of a table on disk are read from there."""
        found: mx.array = self._table(ids[None])
        return found

    def logits(self, states: mx.array) -> mx.array:
        states = states.astype(self._dtype)
        made: mx.array = self._text.lm_head(states) if "lm_head" in self._text else self._table.as_linear(states)
        return made


class ByDrafter(Drafting):
    """A published drafter in memory. It is loaded, and the layers are tapped, before these are bound to a ring.

    Args:
        draft: its ``detail`` is its folder; the bytes that the plan has for the states of a text; the file in which the
            share of its right guesses is kept; and the share that is expected, as it was measured in training (None:
            not measured).
        read: reads its weights.
        layers: the model's.
    """

    kind = DRAFTER

    def __init__(self, draft: Draft, read: Callable[[], BlockDrafter], layers: Sequence[nn.Module]) -> None:
        super().__init__(draft.name)
        self.model = network = read()
        self._weights, self._read, self._taps = draft.weights, read, LayerTaps([layers[n] for n in network.taps])
        self._folder, self._states, self._seen, self._first = draft.detail
        self._statistics: AcceptanceStats | None = None
        self._drafted = 0
        self.holds_head = network.borrows_head
        self.shared: SharedParts | None = None

    def join(self, session: Session) -> Drafting:
        if session.plan.head_streamed and self.holds_head:
            session.note("the model's head is not in memory, so nothing drafts with it but the text's own repetitions")
            return Drafting()
        self.shared, note = SharedParts(session.model), weakref.WeakMethod(session.note)
        self._drafted = session.size.drafted
        self._taps.missed = lambda: None if (noted := note()) is None else noted(UNREADABLE)
        if on_cpu():
            split_rows(self.model, session.cpu_streams)
        return self

    def hidden(self) -> HiddenKeeper | None:
        return None if self.shared is None else HiddenStates(self._taps)

    def source(self, control: DraftLengthPolicy, *args: Any, **named: Any) -> Proposer:
        self._statistics = control.acceptance
        if self._first is not None:
            control.acceptance.sources.setdefault(self.kind, Rate(self._first * WEIGHT))
        return super().source(control, *args, **named)

    def proposer(self, draw: Draw, state: TextState, hidden: HiddenKeeper | None) -> BlockProposer | None:
        if self.shared is None or self.model is None:
            return None
        assert isinstance(hidden, HiddenStates)
        return BlockProposer(self.model, self.shared, draw, hidden)

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        return replace(profile, size=replace(profile.size, rest=profile.size.rest - self._states))

    def give_up(self, session: Session) -> Drafting:
        super().give_up(session)
        return GivenUp(session, self._drafted, self._back)

    def _back(self, session: Session) -> Drafting | None:
        # Where a stored array has to be cast or quantized, it and the result are in memory together.
        if max(info.nbytes for info in tensors_in(self._folder).values()) > session.plan.activation_bytes:
            return None
        found = self._read()
        if sum(a.nbytes for _, a in tree_flatten(found.parameters())) > self._weights:
            return None  # another drafter is in the folder now
        self.model = found
        return self.join(session)

    def close(self) -> None:
        self.model = self.shared = None
        if self._statistics is not None:
            keep(self._seen, self._statistics.sources.get(self.kind))
            self._statistics = None
