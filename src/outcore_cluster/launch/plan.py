"""``outcore plan`` on several machines: each rank's plan, and the prediction for all together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from outcore.calibration.calibration_file import measuring
from outcore.checkpoint.find_model import name_of
from outcore.cli.engine import ProgressBar, model_folder
from outcore.cli.flags import loading_options
from outcore.cli.output import tell
from outcore.decode.preparation import Preparation, prepare
from outcore.sizes import format_size
from outcore.text import printable
from outcore_cluster.forecast import RankPart, RanksPlan
from outcore_cluster.rank_share import RankShare
from outcore_cluster.timing import MOST

# Rounds of measuring. The measurements change which layers a machine gets, and these may need measuring, too.
TURNS = 2
LAYOUTS = {
    "in turn": "Layers lie in turn: each machine reads its next one while another computes.",
    "in blocks": "Layers lie in blocks: each machine's follow each other, so that little goes between them.",
    "": "All layers are on one machine.",
}


def run(args: argparse.Namespace) -> None:
    """Measures each machine that is not measured, makes each machine's plan, and prints all plans on rank 0."""
    folder = model_folder(args)
    prepared = _prepared(folder, loading_options(args), measure=not args.no_calibrate)
    forecast, name = _forecast(prepared), name_of(folder)
    assert forecast is not None  # only ranks come here
    notes = list(prepared.notes)
    if not forecast.calibrated:
        notes.append("predicted from assumptions: not all machines were measured for this model (outcore calibrate)")
    parts = [_part(rank, part) for rank, part in enumerate(forecast.parts)]
    for line in (_together(name, forecast), LAYOUTS[forecast.layout], *parts, *(f"Note: {note}" for note in notes)):
        print(printable(line))
    args.result.record = {"model": name, **forecast.record(), "notes": notes}
    sys.stdout.flush()


def _prepared(folder: Path, options: dict[str, Any], *, measure: bool) -> Preparation:
    """Prepares the model. All ranks measure before that, or none, so that they call each other in the same order."""
    for _ in range(TURNS if measure else 0):
        opened = prepare(folder, **options, least=True)
        if (forecast := _forecast(opened)) is not None and forecast.calibrated:
            break
        with ProgressBar() as bar:
            measuring().calibrated(opened.profile, folder, opened.cpu_streams, progress=bar.measuring, note=tell)
    return prepare(folder, **options)


def _forecast(prepared: Preparation) -> RanksPlan | None:
    share = prepared.profile.share
    return share.forecast if isinstance(share, RankShare) else None


def _together(name: str, shared: RanksPlan) -> str:
    slowest = f"{1000 * shared.link.latency_s:.2g} ms"
    if shared.link.rate < MOST:
        slowest += f" and {format_size(round(shared.link.rate))}/s"
    return (
        f"{name} on {len(shared.parts)} machines: predicted {1 / shared.token_s:.3g} tokens a second "
        f"({shared.token_s:.3g} s a token), {shared.ttft_s:.3g} s to the first (behind a prompt of {shared.prompt} "
        f"tokens, nothing read yet); {slowest} to the slowest of them."
    )


def _part(rank: int, part: RankPart) -> str:
    read = format_size(part.bytes_per_token) if part.bytes_per_token else "nothing"
    return (
        f"rank {rank} ({part.host}): {part.layers} layers, {part.resident} of them in memory; reads {read} a token, at "
        f"{format_size(round(part.read_gbps * 1e9))}/s; holds {format_size(part.peak_bytes)} of "
        f"{format_size(part.budget_bytes)}{'' if part.calibrated else '; assumed, not measured'}."
    )
