"""``RankGroup``, the value of ``LoadOptions.ranks``: what loading and commands call when ranks share a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.decode.preparation import Preparation, draft_kind
from outcore.engine.model_profile import ModelProfile
from outcore.errors import UsageError, called
from outcore.options import LoadOptions
from outcore.plan.joint_plan import AUTO, NONE, Planning
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.workload import Workload

from .forecast import RankPart, RanksPlan
from .link_protocol import Link, RankAgreement
from .rank_share import RankShare
from .sharing import SharedModel, shared_out
from .timing import LinkTimes, measure_link

# Chunk lengths in tokens that are tried for prompts. Shorter ones cost more computing than they save waiting.
STEPS = 32, 64, 128, 256, 512

# Chunks shorter than planned are used if they reduce the time to the first token to less than this fraction.
WORTH = 0.9


@dataclass(eq=False)
class RankGroup:
    """Ranks that share a model (``outcore.decode.preparation.Ranks``).

    Attributes:
        link: this rank's link to the others.
        host: name of this rank's host in messages; empty if it has no name.
    """

    link: Link
    host: str = ""
    _times: LinkTimes | None = None

    @property
    def agreement(self) -> RankAgreement:
        return RankAgreement(self.link)

    @property
    def times(self) -> LinkTimes:
        """The link's latency and rate. The first use measures them, on all ranks at the same time."""
        self._times = self._times or measure_link(self.link)
        return self._times

    # Loading

    def options(self, o: LoadOptions) -> LoadOptions:
        """Returns ``o`` without features that do not work over several machines. Raises ``UsageError`` if one was
        requested."""
        if o.kv_disk == "on":
            raise UsageError(f"{called('kv_disk')} on: does not work over several machines; leave it out")
        if o.exact_batch:
            raise UsageError(f"{called('exact_batch')}: does not work over several machines; leave it out")
        if o.prefix_cache != "off":
            raise UsageError(f"{called('prefix_cache')}: does not work over several machines; leave it out")
        return replace(o, kv_disk="off", lazy=False)

    def share_out(
        self, profile: ModelProfile, o: LoadOptions, folder: Path, known: Calibration | None, budget: int
    ) -> SharedModel:
        return shared_out(profile, self, o, folder, known, budget)

    def room_for_draft(self, planning: Planning, o: LoadOptions, budget: int) -> Planning:
        """Drops a draft that was chosen automatically if a rank has no room for it."""
        if planning.draft is None or draft_kind(o)[0] != AUTO:
            return planning
        if self.agreement.leasts([planning.smallest <= budget])[0]:
            return planning
        return replace(planning, kind=NONE, draft=None)

    def several(
        self, size: ModelSize, plan: Plan, o: LoadOptions, planned: Callable[[LoadOptions], tuple[ModelSize, Plan]]
    ) -> tuple[ModelSize, Plan]:
        """Plans again for the number of sequences, and of their tokens, for which all ranks have room."""
        if not isinstance(o.sequences, Workload):
            return size, plan
        (most,) = self.agreement.leasts([size.sequences])
        found, plan = planned(replace(o, sequences=replace(o.sequences, most=most, least=most)))
        room, joining = self.agreement.leasts([found.room, found.joining])
        return replace(found, shared=room, joining=joining), plan

    def predicted(self, prepared: Preparation, o: LoadOptions) -> Preparation:
        """Returns ``prepared`` with the prediction for all ranks, and with the chunk length that it prefers for
        prompts."""
        profile, plan, share = prepared.profile, prepared.plan, prepared.profile.share
        assert isinstance(share, RankShare)  # ``share_out`` made it
        size = profile.size
        # Rank 0's options hold for all.
        prompt, sequences = self.agreement.numbers(lambda: [size.prompt, size.sequences])
        (longest,) = self.agreement.leasts([plan.prefill_step])
        # If a prompt is one chunk, only one rank at a time computes.
        steps = [longest, *(n for n in STEPS if o.prefill_step_size is None and n < min(longest, prompt))]
        host, notes = self.host or f"rank {self.link.rank}", [*prepared.notes]
        mine = RankPart.of(share, size, plan, prepared.calibration, steps, host=host, notes=notes)
        parts = [RankPart(**json.loads(each)) for each in self.link.gather(json.dumps(asdict(mine)).encode())]
        ways = [RanksPlan.of(parts, prompt, step, share.sent, sequences, self.times) for step in steps]
        best = min(ways, key=lambda way: way.ttft_s)
        found = best if best.ttft_s < WORTH * ways[0].ttft_s else ways[0]
        return replace(
            prepared,
            profile=replace(profile, share=replace(share, forecast=found)),
            plan=replace(plan, prefill_step=min(plan.prefill_step, found.step)),
            notes=(*prepared.notes, *self.notes(found)),
        )

    def notes(self, found: RanksPlan) -> list[str]:
        """Returns the notes to show: on rank 0 the other ranks' notes, on another rank how many layers it has."""
        if rank := self.link.rank:
            of = sum(part.layers for part in found.parts)
            return [f"{found.parts[rank].layers} of {of} layers are this machine's, rank {rank} of {len(found.parts)}"]
        known = found.parts[0].notes
        return [
            f"rank {rank} ({part.host}): {note}"
            for rank, part in enumerate(found.parts)
            for note in part.notes
            if note not in known
        ]

    # Commands

    def model_folder(self, name: str, revision: str | None) -> Path:
        """Returns the model's folder once all ranks have the model."""
        folder = resolve_model(name, revision)
        self.link.gather(b"")
        return folder

    def serves(self, args: argparse.Namespace, names: Sequence[str]) -> bool:
        """Whether this rank runs the server of ``outcore serve``. On other ranks, returns when the server ends."""
        from .launch.serve import serves

        return serves(self, args, names)

    def close(self) -> None:
        self.link.close()
