"""Rows of a bench on several machines: each is a run of processes, one on each of them, beside the run that asks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from outcore.loading.preparation import Preparation, prepare
from outcore.options import LoadOptions
from outcore_cluster.agreement import Agreement
from outcore_cluster.group import RankGroup
from outcore_cluster.link.beside import run_beside
from outcore_cluster.link.socket_link import SocketLink

from .document import BenchRow
from .jobs import BenchJob
from .processes import KILLED, Started, failed, measure_row
from .runner import Runner


class RankedRunner(Runner):
    """``Runner`` on every rank: all measure what the first one measures, whose document counts.

    Args:
        ranks: of this run. Others as ``Runner``'s.

    Raises:
        As ``Runner``. UsageError: the model cannot be shared out. LinkError: a rank is gone.
    """

    def __init__(self, ranks: RankGroup, *arguments: Any, **named: Any) -> None:
        self._ranks = ranks
        super().__init__(*arguments, **named)
        told = Agreement(ranks.link).text(lambda: json.dumps([asdict(job) for job in self.jobs]))
        # Where the model is, and what a row is called, may be another here.
        self.jobs = [replace(BenchJob.of(each), folder=str(self.folder)) for each in json.loads(told)]
        # Layers are this rank's; weights are all of them.
        layers, nbytes = self._sums([self.document.model.layers, self.document.model.layer_bytes])
        self.document.model = replace(self.document.model, layers=layers, layer_bytes=nbytes)
        self.document.settings["hosts"] = [told.decode() for told in ranks.link.gather((ranks.host or "").encode())]
        self.document.command = self._launched(self.document.command)

    def _opened(self, **options: Any) -> tuple[Preparation, bool]:
        prepared = prepare(self.folder, LoadOptions(**options, ranks=self._ranks, draft="none"), least=True)
        fits = prepared.refused is None and not prepared.plan.streams
        return prepared, bool(Agreement(self._ranks.link).leasts([fits])[0])

    def _most_layers(self, own: int) -> int:
        # Of one that has fewer all are resident, where others have as many in memory.
        return -Agreement(self._ranks.link).leasts([-own])[0]

    def _command(self, job: BenchJob) -> str:
        return self._launched(super()._command(job))

    def _launched(self, command: str) -> str:
        return f"outcore launch --hosts {shlex.quote(','.join(self.document.settings['hosts']))} -- {command[8:]}"

    def _sums(self, values: Sequence[int]) -> list[int]:
        told = [json.loads(each) for each in self._ranks.link.gather(json.dumps(values).encode())]
        return [sum(each) for each in zip(*told, strict=True)]

    def _measure(self, job: BenchJob) -> BenchRow:
        link = self._ranks.link
        assert isinstance(link, SocketLink)  # what has processes of its own
        with run_beside(link, f"row {len(self.document.rows)}") as (variables, descriptors):
            row = measure_row(job, self.files, Started(variables, descriptors))
        errors = [told.decode() for told in link.gather((row.error or "").encode())]
        if not any(errors):
            there = [f"{part['resident']} of {part['layers']} on {part['host']}" for part in row.ranks or ()]
            row.notes.append(f"layers in memory: {', '.join(there)}; all other numbers are the first machine's")
            return row
        return failed(job, _first(errors, link))

    def compare(self) -> None:
        """A ceiling would take all disks at once, and mlx-lm's tokens are not here."""


def _first(errors: Sequence[str], link: SocketLink) -> str:
    """Whose error it is: those of others say that it is gone."""
    whose = range(link.size)
    known = [rank for rank in whose if errors[rank] and not errors[rank].startswith("rank ")]
    rank = min(known, key=lambda rank: errors[rank] != KILLED, default=next(rank for rank in whose if errors[rank]))
    error = errors[rank]
    return error if error.startswith("rank ") else f"{link.identity.who(rank)}: {error}"
