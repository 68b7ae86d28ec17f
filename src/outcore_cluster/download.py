"""A model of the Hub that several ranks share: each downloads the shards that hold what it needs.

Which layers are whose follows from what all ranks tell of their memory and disks, and from the shards' headers, which
the Hub gives without their bytes. A rank that has the whole model keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx_lm.utils

from outcore.calibration.calibration_file import load_calibration
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.find_model import download, local_model
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.packed_store import open_model
from outcore.decode.speculative.drafting import parse_draft
from outcore.engine.model_profile import ModelProfile
from outcore.errors import CheckpointError, MissingFileError
from outcore.loading.budget import asked_budget
from outcore.loading.opened import measured
from outcore.machine.device import on_cpu
from outcore.machine.hardware import cores
from outcore.options import LoadOptions
from outcore.plan.draft_cost import SELF

from .drafts import SharedModel, Sharing
from .partial_checkpoint import Absent, RankLayers, headers_in_hub, keep_share, kept_share, open_partial
from .rank_share import RankShare, head_paths
from .sharing import shared_out

if TYPE_CHECKING:
    from .group import RankGroup

SMALL = [pattern for pattern in mlx_lm.utils.DEFAULT_ALLOW_PATTERNS if not pattern.endswith("safetensors")]
"""What is downloaded of a model whatever a rank holds."""

THERE, WHOLE, PART, MISSING = "there", "whole", "part", "missing"
"""A folder that was named; a model in the Hub's cache: all of it, what a rank needed once, or less."""

Say = Callable[[str], None]


def resolve_shared(name: str, revision: str | None, o: LoadOptions, ranks: RankGroup, say: Say) -> Path:
    """The local folder of a model that ranks share; all of them ask at the same time.

    Args:
        o: as the model will be loaded. ``say``: is told what is downloaded.

    Raises:
        As ``resolve_model``.
    """
    if (local := local_model(name)) is not None:
        folder, found = local, THERE
    else:
        folder, found = _cached(name, revision)
    told = [each.decode() for each in ranks.link.gather(found.encode())]
    if MISSING not in told:
        return folder
    if THERE in told:
        # A folder, on some of the hosts: nobody knows which model of the Hub it is.
        return local or download(name, revision)
    lacks = found != WHOLE
    if lacks:
        folder = download(name, revision, SMALL)
    headers = headers_in_hub(name, folder.name) if lacks else {}
    if not all(json.loads(each) for each in ranks.link.gather(json.dumps(headers is not None).encode())):
        say(f"{name}: downloaded whole: which of its files hold which layers is not known before")
        return download(name, revision)
    needed = _needed(folder, headers if lacks else None, o, ranks)
    if lacks and needed is None:
        say(f"{name}: downloaded whole: its weights are changed as they are loaded")
        folder = download(name, revision)
    elif needed is not None and headers is not None:
        files = sorted(headers.keys() - needed.absent.keys())
        say(f"{name}: {len(files)} of {len(headers)} files hold what this machine needs")
        folder = download(name, folder.name, [*SMALL, *files])
        keep_share(folder, needed)
    ranks.link.gather(b"")  # ranks may share a cache
    return folder


def _cached(name: str, revision: str | None) -> tuple[Path, str]:
    """The folder of the Hub's cache, and how much of the model it has."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # the Hub's errors share no base; downloading tells what is wrong
        return Path(name), MISSING
    if kept_share(folder) is not None:
        return folder, PART
    try:
        open_checkpoint(folder)
    except (MissingFileError, CheckpointError):
        return folder, MISSING
    return folder, WHOLE


def _needed(
    folder: Path, headers: Mapping[str, list[Absent]] | None, o: LoadOptions, ranks: RankGroup
) -> RankLayers | None:
    """Which shards this rank does without; None: it needs all, or has them (no ``headers``)."""
    link = ranks.link
    nobody = RankLayers(rank=link.rank, ranks=link.size, owners=[], absent=dict(headers or {}))
    arguments: dict[str, Any] = {
        "model_config": o.model_config, "trust_remote_code": o.trust_remote_code, "adapter_path": o.adapter_path,
    }  # fmt: skip
    lazy = open_model(folder, **arguments) if headers is None else open_partial(folder, nobody, **arguments)
    known = load_calibration(folder, (o.cpu_streams or cores()) if on_cpu() else 1)
    profile = measured(lazy, o, known)
    heads = head_paths(profile)
    budget = asked_budget(o.memory, o.profile)
    share = shared_out(profile, ranks, budget, known, o.resident, _nothing_drafts, fresh=True).profile.share
    assert isinstance(share, RankShare)  # it was shared out
    unneeded = _unneeded(lazy, profile, share.owners, link.rank, heads)
    if unneeded is None or headers is None:
        return None
    absent = {
        file: tensors
        for file, tensors in headers.items()
        if all(each.name in unneeded for each in tensors) and not (folder / file).exists()
    }
    if link.rank == 0 and parse_draft(o.draft)[0] == SELF:
        absent = {}  # the copy that drafts is made of all layers
    return RankLayers(rank=link.rank, ranks=link.size, owners=list(share.owners), absent=absent)


def _nothing_drafts(sharing: Sharing) -> SharedModel:
    """What drafts is opened when the model is loaded, with the layers where they are by then."""
    return SharedModel(sharing.owners(None), None)


def _unneeded(
    lazy: LazyModel, profile: ModelProfile, owners: tuple[int, ...], rank: int, heads: frozenset[str]
) -> set[str] | None:
    """Tensors, as files name them, that this rank does without; None: nobody knows, as what is loaded is changed."""
    foreign = tuple(f"{layer.path}." for i, layer in enumerate(profile.layers) if owners[i] != rank)
    own = tuple(f"{layer.path}." for i, layer in enumerate(profile.layers) if owners[i] == rank)
    if any(path.startswith(own) and path not in lazy.origins for path in lazy.loaded):
        return None
    return {info.name for path, info in lazy.origins.items() if path.startswith(foreign) or (rank and path in heads)}
